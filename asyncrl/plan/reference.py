"""What the reference computes and its own other numbers contradict: for its mode alone. docs/planner.md says what is wrong with each."""

from __future__ import annotations

from asyncrl.plan.agentic import AgenticWorkload
from asyncrl.plan.decode import decode_step_s
from asyncrl.plan.hardware import Hardware
from asyncrl.plan.models import ModelShape


def agentic_rate(model: ModelShape, *, hardware: Hardware, workload: AgenticWorkload) -> float:
    """Tokens a second of a GPU with as many contexts as decode at once, ⌊rollouts/n · generation/(generation + environment)⌋, whether
    or not their KV cache fits. `agentic_decode` asks for that."""
    busy = workload.generation_s / (workload.generation_s + workload.environment_s)
    concurrency = int(workload.rollouts / workload.gpus * busy)
    return concurrency / decode_step_s(model, hardware=hardware, tensor_parallel=1, concurrency=concurrency,
                                       context_tokens=workload.mean_context_tokens)


def switch_s(total_params: float, *, gpus: int, pcie_bytes_s: float) -> float:
    """2·(16 + 2)·N/n over PCIe: states and a copy of the weights. Where it measures a hand-over it moves 16N/n, as `hand_off` does."""
    return 2 * 18.0 * total_params / gpus / pcie_bytes_s


def agentic_train_flop_12n(model: ModelShape, *, workload: AgenticWorkload) -> float:
    """12N·T, which counts the decode of tokens that the environment wrote; `agentic_train_flop` is 10N·T."""
    return 12.0 * model.active_params * workload.rollouts * workload.final_context_tokens
