"""Generation: how many sequences an engine holds, how long a decode step takes, and when the last answer is there."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from asyncrl.errors import ConfigError
from asyncrl.plan.hardware import Hardware
from asyncrl.plan.lengths import Lengths, mean_in_flight_tokens
from asyncrl.plan.models import ModelShape
from asyncrl.plan.workload import Placement, Workload

IMBALANCE = 1.25
"""Of KV bytes between the busiest engine and the mean one, at a barrier: fitted to simulated batches of log-normal answers."""
_EULER_SHARE = 0.5615
"""e^−γ: the largest of S draws lies about at the share 1 − e^−γ/S."""
_ROUNDS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """Generation of a whole batch on the engines of a placement."""

    engines: int
    pool_bytes: float
    """KV cache of an engine."""
    context_tokens: float
    """Of a sequence in flight, on average over time."""
    pool_concurrency: int
    """Sequences that the pool holds."""
    concurrency: float
    """Of them, what the batch fills: at most rollouts / engines."""
    step_s: float
    """Of a decode step at this concurrency: the time between two tokens of a sequence."""
    throughput_s: float
    """The batch, if engines stayed full until its end."""
    tail_s: float
    """From then to the last answer."""

    @property
    def generation_s(self) -> float:
        """Of a batch with a barrier at its end."""
        return self.throughput_s + self.tail_s

    @property
    def tail_frac(self) -> float:
        """f: the tail's share of generation."""
        return self.tail_s / self.generation_s


def kv_pool_bytes(model: ModelShape, *, hardware: Hardware, placement: Placement) -> float:
    """What is left of an engine's memory for KV cache: tp·(1 − reserve)·M − W; bounded by a utilisation u, tp·(u·M − activations) − W.

    Raises ConfigError when the weights alone do not fit.
    """
    eff, u = hardware.efficiencies, placement.gpu_memory_utilization
    rank = (1.0 - eff.reserve) * hardware.memory_bytes if u is None else u * hardware.memory_bytes - eff.activation_bytes
    pool = placement.tensor_parallel * rank - model.replica_bytes
    if pool <= 0:
        least = math.floor(model.replica_bytes / rank) + 1 if rank > 0 else 0
        remedy = (f"Set tensor_parallel to {least} or more, take GPUs with more memory, or an FP8 replica." if least
                  else "Raise gpu_memory_utilization.")
        raise ConfigError("model, tensor_parallel", value=(model.name, placement.tensor_parallel),
                          allowed=f"{model.replica_bytes / 1e9:.1f} GB of weights in {placement.tensor_parallel} × {rank / 1e9:.1f} GB",
                          remedy=remedy)
    return pool


def decode(model: ModelShape, *, hardware: Hardware, workload: Workload, placement: Placement,
           in_flight_rollouts: float | None = None) -> Decode:
    """Generation of the batch, all GPUs of the placement generating; `in_flight_rollouts` may be in flight at once, else the batch.

    A step reads the weights and all KV cache: t = (W + c·ctx·κ)/(tp·BW·η); T_resp tokens, engines·c a step: T_thr = T_resp/(engines·c)·t.
    ctx = P + E[L²]/(2E[L]): κ·Σ(P·L_i + L_i²/2) bytes are read for any batching, and this average gives just them.
    """
    pool = kv_pool_bytes(model, hardware=hardware, placement=placement)
    context = workload.prompt_tokens + workload.turns * workload.environment_tokens / 2 + mean_in_flight_tokens(workload.lengths)
    fits = math.floor(pool / (context * model.kv_token_bytes))
    if fits < 1:
        raise ConfigError("tensor_parallel", value=placement.tensor_parallel,
                          allowed=f"a KV cache of {pool / 1e9:.2f} GB that holds one sequence of {context:.0f} tokens, "
                                  f"{context * model.kv_token_bytes / 1e9:.2f} GB", remedy="Raise tensor_parallel, or shorten the answers.")
    if placement.engines < 1:
        raise ConfigError("gpus", value=placement.gpus, allowed="one engine at least", remedy="Lower tensor_parallel, or add GPUs.")
    concurrency = min(float(fits), (in_flight_rollouts or workload.rollouts) / placement.engines)
    active, step_s = _steady(model, hardware, workload, placement, (concurrency, context))
    throughput_s = workload.response_tokens / (placement.engines * active) * step_s
    result = Decode(engines=placement.engines, pool_bytes=pool, context_tokens=context, pool_concurrency=fits, concurrency=concurrency,
                    step_s=step_s, throughput_s=throughput_s, tail_s=0.0)
    tail_s = (_reference_tail_s if workload.lengths.is_reference else _tail_s)(result, model, hardware, workload, placement)
    return replace(result, tail_s=tail_s)


def decode_step_s(model: ModelShape, *, hardware: Hardware, tensor_parallel: int, concurrency: float, context_tokens: float) -> float:
    """Between two tokens of a sequence: (W + c·ctx·κ)/(tp·BW·η), the bytes a step reads, and what launches cost."""
    read = model.replica_bytes + concurrency * context_tokens * model.kv_token_bytes
    eff = hardware.efficiencies
    return read / (tensor_parallel * hardware.memory_bytes_s * eff.decode_bandwidth) + eff.step_overhead_s


def longest_tokens(lengths: Lengths, *, rollouts: int) -> float:
    """Expected longest of so many answers: the inverse distribution at 1 − e^−γ/S; the reference's is its maximum."""
    if lengths.is_reference:
        return float(lengths.max_tokens)
    return lengths.quantile(max(0.5, 1.0 - _EULER_SHARE / rollouts))


def _steady(model: ModelShape, hardware: Hardware, workload: Workload, placement: Placement,
            held: tuple[float, float]) -> tuple[float, float]:
    """Sequences that decode, of those held, and their step: the others wait for the environment; a fixed point, as both follow the step.

    A step computes 2N FLOP a sequence, so it is never shorter than that takes; the reference leaves this out.
    """
    concurrency, context = held
    eff = hardware.efficiencies
    waiting_s, active, step_s = workload.turns * workload.environment_s, concurrency, 0.0
    for _ in range(_ROUNDS if waiting_s else 1):
        step_s = decode_step_s(model, hardware=hardware, tensor_parallel=placement.tensor_parallel, concurrency=concurrency,
                               context_tokens=context * active / concurrency)
        if not workload.lengths.is_reference:
            peak = placement.tensor_parallel * hardware.peak_flop_s * eff.forward_mfu
            step_s = max(step_s, 2.0 * model.active_params * active / peak + eff.step_overhead_s)
        decoding_s = workload.lengths.mean_tokens * step_s
        active = concurrency * decoding_s / (decoding_s + waiting_s)
    return active, step_s


def _weights_step_s(model: ModelShape, hardware: Hardware, placement: Placement) -> float:
    return decode_step_s(model, hardware=hardware, tensor_parallel=placement.tensor_parallel, concurrency=0.0, context_tokens=0.0)


def _reference_tail_s(result: Decode, model: ModelShape, hardware: Hardware, workload: Workload, placement: Placement) -> float:
    """(L_max − L̄)·W/(tp·BW·η): the longest answer goes on alone, and a step then reads the weights."""
    alone = workload.lengths.max_tokens - workload.lengths.mean_tokens
    return alone * _weights_step_s(model, hardware, placement)


def _tail_s(result: Decode, model: ModelShape, hardware: Hardware, workload: Workload, placement: Placement) -> float:
    """Barrier − T_thr, barrier = KV part × imbalance + W/(tp·BW·η) × steps (+ the environment's time in the longest rollout).

    All KV bytes are read whatever the order, on the busiest engine IMBALANCE times the mean; the weights are read once a step, and there
    are as many steps as the longest answer has tokens, or as the waves need.
    """
    weights_step_s = _weights_step_s(model, hardware, placement)
    steps = workload.response_tokens / (result.engines * result.concurrency)
    kv_s = max(0.0, result.throughput_s - steps * weights_step_s)
    imbalance = IMBALANCE if result.engines > 1 else 1.0
    longest = longest_tokens(workload.lengths, rollouts=workload.rollouts)
    barrier_s = kv_s * imbalance + max(steps, longest) * weights_step_s + workload.turns * workload.environment_s
    return max(0.0, barrier_s - result.throughput_s)
