"""Cases that hold for any numbers: the largest relative error over drawn ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from asyncrl.plan.decode import decode
from asyncrl.plan.hardware import hardware_named
from asyncrl.plan.lengths import Histogram
from asyncrl.plan.models import model_named
from asyncrl.plan.shapes import Jobs, balanced_async_s, colocated_s
from asyncrl.plan.workload import Placement, Workload
from tests.parity.planner_inputs import Inputs


def answer(name: str, inputs: Inputs) -> float | None:
    return LAWS[name]() if name in LAWS else None


def _kv_bytes() -> float:
    """KV bytes that the planned decode reads, against κ·Σ over every token of every answer."""
    rng, model, hardware = np.random.default_rng(0), model_named("llama-3-8b"), hardware_named("h100")
    errors = []
    for _ in range(20):
        drawn = rng.integers(500, 20_000, size=64)
        work = Workload(prompts=64, group_size=1, prompt_tokens=float(rng.integers(1, 2000)), lengths=Histogram.of(drawn))
        plan = decode(model, hardware=hardware, workload=work, placement=Placement(gpus=2))
        bandwidth = hardware.memory_bytes_s * hardware.efficiencies.decode_bandwidth
        steps = work.response_tokens / (plan.engines * plan.concurrency)
        read = (plan.throughput_s * bandwidth - steps * model.replica_bytes) * plan.engines
        wanted = model.kv_token_bytes * sum(float(np.sum(work.prompt_tokens + np.arange(length))) for length in drawn)
        errors.append(abs(read / wanted - 1.0))
    return max(errors)


def _async_le_colocated() -> float:
    """By how much balanced async exceeds colocated, or misses it without a tail."""
    rng, errors = np.random.default_rng(0), []
    for _ in range(100):
        jobs = Jobs(gpus=64, throughput_s=rng.uniform(1, 1e3), tail_s=rng.uniform(0, 1e3), train_s=rng.uniform(1, 1e3))
        flat = Jobs(gpus=64, throughput_s=jobs.throughput_s, tail_s=0.0, train_s=jobs.train_s)
        errors += [max(0.0, balanced_async_s(jobs) / colocated_s(jobs) - 1.0), abs(balanced_async_s(flat) / colocated_s(flat) - 1.0)]
    return max(errors)


LAWS: dict[str, Callable[[], float]] = {"invariant_kv_bytes": _kv_bytes, "invariant_async_le_colocated": _async_le_colocated}
