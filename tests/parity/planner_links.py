"""Cases of bytes on their way: hand-off, weight sync, bubbles, staleness, re-prefill, checkpoints."""

from __future__ import annotations

import re
from typing import Any

from asyncrl.plan.costs import step_flop
from asyncrl.plan.lengths import MeanMax
from asyncrl.plan.memory import checkpoint_bytes, checkpoint_s, states_bytes
from asyncrl.plan.reference import switch_s
from asyncrl.plan.staleness import reprefill_flop, staleness
from asyncrl.plan.sync import bubble_frac, buckets, delta_s, hand_off, line_rate_s, multi_source_s, single_source_s
from asyncrl.plan.workload import Algorithm, Workload
from tests.parity.planner_inputs import Inputs, hardware_of, links_of, model_of

_REFERENCE = Workload(prompts=512, group_size=16, prompt_tokens=500, lengths=MeanMax(8192, 32768))
"""Where a case gives no step to compare with."""


def answer(name: str, inputs: Inputs) -> Any:
    if "agentic" in inputs or "work" in inputs:
        return None
    if "t_sync" in inputs:
        return bubble_frac(inputs["t_sync"], minibatches=inputs["k"], minibatch_s=inputs["t_mb"])
    if {"full", "delta"} <= inputs.keys():
        return inputs["full"] / inputs["delta"]
    if "interval" in inputs:
        return staleness(inputs["L"] * inputs["step"], wait_s=inputs.get("wait", 0.0), interval_s=inputs["interval"])
    if "inflight" in inputs:
        return _reprefill(inputs)
    if "ckpt" in name or "checkpoint" in name:
        return _checkpoint(name, inputs)
    if "bytes" in inputs or "wire_bytes" in inputs:
        return _sync(name, inputs)
    return _hand_off(name, inputs) if "model" in inputs and "n" in inputs else None


def _sync(name: str, inputs: Inputs) -> Any:
    size, links = inputs.get("wire_bytes", inputs.get("bytes")), links_of(inputs)
    if "changed" in inputs:
        if isinstance(size, list):
            return [delta_s(full, ranks=ranks, changed_frac=inputs["changed"], tensors=tensors)
                    for full, ranks, tensors in zip(size, inputs["ranks"], inputs["tensors"], strict=True)]
        return delta_s(size, ranks=inputs["ranks"], changed_frac=inputs["changed"], tensors=inputs["tensors"])
    if "bound" in name:
        return line_rate_s(size, links=links)
    if "multi" in name:
        return multi_source_s(size, links=links)
    if "bucket" in name:
        return buckets(size)
    return single_source_s(size, links=links, layout=inputs.get("layout", "none"))


def _reprefill(inputs: Inputs) -> float:
    model = model_of(inputs)
    step = inputs.get("step_flop") or step_flop(model, workload=_REFERENCE, algorithm=Algorithm()).total
    again = reprefill_flop(model.active_params, in_flight=inputs["inflight"], context_tokens=inputs["ctx"], syncs=inputs.get("syncs", 1))
    return again / step


def _checkpoint(name: str, inputs: Inputs) -> float:
    params = model_of(inputs).total_params
    if "disk" in inputs or "time" in name:
        return checkpoint_s(params, disk_bytes_s=inputs.get("disk", links_of(inputs).disk_bytes_s))
    return checkpoint_bytes(params)


def _hand_off(name: str, inputs: Inputs) -> float | None:
    model, hardware, gpus = model_of(inputs), hardware_of(inputs), inputs["n"]
    moved = hand_off(model.total_params, gpus=gpus, hardware=hardware, engine_bytes=2.0 * model.total_params)
    word = name.split("_", 1)[1] if "_" in name else name
    if re.match(r"fit|states", word):
        return states_bytes(model.total_params, gpus=gpus)
    if re.match(r"v3|switch|8b", word):
        return switch_s(model.total_params, gpus=gpus, pcie_bytes_s=hardware.links.pcie_bytes_s)
    if "step_s" in inputs:
        return moved.total_s / inputs["step_s"]
    asked = {"bytes": moved.bytes_per_gpu, "time": moved.total_s, "opt": moved.optimizer_s, "pinned": moved.pinned_bytes}
    for start, value in asked.items():
        if start in word:
            return value
    return None
