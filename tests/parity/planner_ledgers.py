"""Cases of a whole step: a model, machines, a workload. One word of the name says which of its numbers is asked for."""

from __future__ import annotations

import re
from typing import Any

from asyncrl.plan.costs import attention_ratio
from asyncrl.plan.phases import mfu, waterfall
from asyncrl.plan.shapes import balanced_async_s
from tests.parity.planner_inputs import Inputs, phases_of, setup_of

_WATERFALL = {"decode": "decode", "tail": "tail", "fwd": "forward", "train": "train", "switch_sync": "switch_sync", "mfu": "mfu"}
_ALIASES = {"colo": "total", "step_s": "total", "colocated": "total", "total_s": "total", "concurrency": "conc", "c": "conc",
            "t_step": "step", "decode_step": "step", "generation": "gen", "forward": "fwd", "forwards": "fwd", "score": "fwd",
            "scoring": "fwd",
            "flop_total": "flop", "training": "train", "throughput": "thr", "kv": "kv_total", "share": "gen_share", "tail_frac": "f"}


def answer(name: str, inputs: Inputs) -> Any:
    if "work" not in inputs:
        return None
    if name.startswith("waterfall"):
        return _lost(inputs)
    if "_wf_" in name:
        return _lost(inputs)[name.split("_wf_")[1]]
    if name.startswith("ledger"):
        return {kind: _numbers(inputs)[kind] for kind in ("flop", "total_s", "mfu")}
    if name.startswith("longer"):
        return {kind: _numbers(inputs)[kind] for kind in ("colocated_s", "async_s", "f")}
    numbers = _numbers(inputs)
    other = _relative(inputs)
    if other is not None:
        kind = "mfu" if name.endswith("mfu") else "total"
        return numbers[kind] / _numbers(other)[kind] - 1.0
    if re.search(r"util\d*$", name):
        return numbers["gen"]
    words = name.split("_")
    for start in range(1, len(words)):
        word = "_".join(words[start:])
        if (kind := _ALIASES.get(word, word)) in numbers:
            return numbers[kind]
    return None


def _relative(inputs: Inputs) -> Inputs | None:
    """The case to compare with: `same with n=64`, `same with ppo=false`."""
    text = inputs.get("relative_to")
    if text is None:
        return None
    key, value = re.fullmatch(r"same with (\w+)=(\S+)", text).groups()  # type: ignore[union-attr]
    new = {"true": True, "false": False}.get(value.lower())
    new = new if new is not None else (float(value) if "." in value or "e" in value else int(value))
    place = inputs if key in inputs or key in ("n", "tp", "util") else {**inputs["work"]}
    changed = {**place, key: new}
    return changed if place is inputs else {**inputs, "work": changed}


def _numbers(inputs: Inputs) -> dict[str, float]:
    setup, step = setup_of(inputs), phases_of(inputs)
    share, peak = step.flop.total, setup.hardware.peak_flop_s
    return {"flop": share, "flop_per_token": share / setup.model.active_params / setup.workload.all_tokens,
            "kv_total": setup.workload.all_tokens * setup.model.kv_token_bytes, "conc": step.decode.concurrency,
            "pool": step.decode.pool_bytes, "step": step.decode.step_s, "thr": step.decode.throughput_s, "tail": step.decode.tail_s,
            "gen": step.decode.generation_s, "fwd": step.forward_s, "train": step.train_s, "total": step.total_s, "total_s": step.total_s,
            "mfu": mfu(share, gpus=step.gpus, peak_flop_s=peak, seconds=step.total_s), "switch": step.switch_s, "sync": step.sync_s,
            "gen_share": step.decode.generation_s / step.total_s, "f": step.decode.tail_frac, "colocated_s": step.total_s,
            "async_s": balanced_async_s(step.jobs), "attn_ratio": attention_ratio(setup.model, workload=setup.workload)}


def _lost(inputs: Inputs) -> dict[str, float]:
    lost = waterfall(phases_of(inputs), peak_flop_s=setup_of(inputs).hardware.peak_flop_s)
    return {name: lost[cause] for name, cause in _WATERFALL.items()}
