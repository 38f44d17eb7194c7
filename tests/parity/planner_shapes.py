"""Cases of the four shapes, from the seconds of their jobs."""

from __future__ import annotations

from typing import Any

from asyncrl.plan.phases import mfu
from asyncrl.plan.shapes import Jobs, async_gain, async_s, best_split, colocated_s, disaggregated_s, fitted_floor, one_step_s, removal_cap
from asyncrl.plan.staleness import update_interval_s
from tests.parity.planner_inputs import Inputs

_SHAPES = {"colocated": "colocated", "disagg": "disaggregated", "disaggregated": "disaggregated", "onestep": "one_step",
           "one_step": "one_step", "async": "async", "step": "async"}


def answer(name: str, inputs: Inputs) -> Any:
    if "throughput_k" in inputs:
        return {"x": fitted_floor(inputs["n_relative"], throughput=inputs["throughput_k"])}
    if {"total", "gen"} <= inputs.keys():
        return removal_cap(inputs["total"], removed_s=inputs["gen"])
    if "minibatches" in inputs:
        return update_interval_s(inputs["train"], gpus=inputs["n"], train_gpus=inputs["nt"], minibatches=inputs["minibatches"])
    if "thr" not in inputs:
        return None
    jobs = Jobs(gpus=inputs.get("n", 2), throughput_s=inputs["thr"], tail_s=inputs.get("tail", 0.0), train_s=inputs["train"])
    if "gain" in name:
        return async_gain(jobs)
    if "shape" in inputs:
        return _split(jobs, inputs)
    if "nr" not in inputs or name.endswith("ratio"):
        return jobs.throughput_s / jobs.train_s if "ratio" in name else None
    shape = next((_SHAPES[key] for key in _SHAPES if key in name), "async")
    seconds = _seconds(jobs, shape, inputs["nr"], inputs.get("sync", 0.0))
    if name.endswith("mfu") or "util" in name:
        return mfu(inputs["flop"], gpus=inputs["n"], peak_flop_s=inputs["peak"], seconds=seconds)
    return seconds


def _seconds(jobs: Jobs, shape: str, rollout_gpus: int, sync_s: float) -> float:
    if shape == "colocated":
        return colocated_s(jobs)
    if shape == "disaggregated":
        return disaggregated_s(jobs, rollout_gpus=rollout_gpus)
    if shape == "one_step":
        return one_step_s(jobs, rollout_gpus=rollout_gpus, sync_s=sync_s)
    return async_s(jobs, rollout_gpus=rollout_gpus)


def _split(jobs: Jobs, inputs: Inputs) -> dict[str, float]:
    shape, sync_s = _SHAPES[inputs["shape"]], inputs.get("sync", 0.0)
    best = best_split(jobs.gpus, unit_gpus=inputs.get("unit", 1), step_s=lambda rollout: _seconds(jobs, shape, rollout, sync_s))
    return {"nr": best.rollout_gpus, "step_s": best.step_s}
