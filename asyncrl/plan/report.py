"""A plan as tables and as one JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from asyncrl.plan.lengths import cv2
from asyncrl.plan.step import StepPlan


def as_json(plan: StepPlan) -> dict[str, Any]:
    """Every number of a plan, in SI units: its keys are part of the interface."""
    step, setup = plan.phases, plan.setup
    return {
        "mode": "deck" if setup.is_reference else "corrected", "best": plan.best,
        "model": asdict(setup.model), "hardware": asdict(setup.hardware), "placement": asdict(setup.placement),
        "shapes": {name: asdict(shape) for name, shape in plan.shapes.items()},
        "colocated": {"generation_s": step.decode.generation_s, "tail_s": step.decode.tail_s, "throughput_s": step.decode.throughput_s,
                      "prefill_s": step.prefill_s, "forward_s": step.forward_s, "train_s": step.train_s, "switch_s": step.switch_s,
                      "sync_s": step.sync_s, "total_s": plan.shapes["colocated"].total_s, "mfu": plan.shapes["colocated"].mfu,
                      "flop": step.flop.total},
        "waterfall": plan.waterfall,
        "flop": {**asdict(step.flop), "total": step.flop.total, "attention_ratio": plan.attention_ratio},
        "decode": asdict(step.decode), "async_decode": asdict(plan.async_decode) if plan.async_decode else None,
        "lengths": {"mean_tokens": setup.workload.lengths.mean_tokens, "max_tokens": setup.workload.lengths.max_tokens,
                    "cv2": cv2(setup.workload.lengths)},
        "sync": {**asdict(plan.sync), "chosen_s": plan.sync_s, "bubble_frac": plan.bubble_frac},
        "hand_off": asdict(plan.hand_off),
        "memory": {**asdict(plan.memory), "trains": plan.memory.trains, "changes_hands": plan.memory.changes_hands},
        "staleness": {**asdict(plan.staleness), "mean": plan.staleness.mean, "max": plan.staleness.max} if plan.staleness else None,
        "reprefill_frac": plan.reprefill_frac,
        "checkpoint": {"bytes": plan.checkpoint_bytes, "seconds": plan.checkpoint_s},
        "environments": asdict(plan.environments) if plan.environments else None}


def as_text(plan: StepPlan) -> str:
    """Tables for people."""
    parts = [_head(plan), _table(_shapes(plan)), _table(_jobs(plan)), _table(_waterfall(plan)), _table(_around(plan))]
    return "\n\n".join(part for part in parts if part)


def _head(plan: StepPlan) -> str:
    setup, work = plan.setup, plan.setup.workload
    lines = [f"{setup.model.name}, {setup.model.total_params / 1e9:.3g}B parameters"
             + (f", {setup.model.active_params / 1e9:.3g}B active" if setup.model.is_mixture else "")
             + f", on {setup.placement.gpus} × {setup.hardware.name}, engines of {setup.placement.tensor_parallel}",
             f"{work.prompts} prompts × {work.group_size}, prompts of {work.prompt_tokens:.0f} tokens, answers of "
             f"{work.lengths.mean_tokens:.0f} on average (CV² {cv2(work.lengths):.2f}), at most {work.lengths.max_tokens}"]
    if setup.is_reference:
        lines.append("the reference's first-order model: no spread of lengths, no stalls; docs/planner.md says where it is off")
    return "\n".join(lines)


def _shapes(plan: StepPlan) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = [("shape", "step", "MFU", "tokens/s", "rollout : train", "GPU·h", "")]
    for name, shape in plan.shapes.items():
        split = "all, in turn" if name == "colocated" else f"{shape.rollout_gpus} : {shape.train_gpus}"
        note = shape.obstacle or ("fastest" if name == plan.best else "")
        rows.append((name, _seconds(shape.total_s), f"{shape.mfu:.1%}", f"{shape.tokens_s:,.0f}", split, f"{shape.gpu_h:.2f}", note))
    return rows


def _jobs(plan: StepPlan) -> list[Sequence[str]]:
    step, decode = plan.phases, plan.phases.decode
    return [("job, on all GPUs", "time", ""),
            ("generation", _seconds(decode.generation_s), f"{decode.concurrency:.0f} sequences an engine, {decode.step_s * 1e3:.1f} ms "
             "a token"),
            ("  of it the tail", _seconds(decode.tail_s), f"{decode.tail_frac:.0%} of generation"),
            ("prefill", _seconds(step.prefill_s), ""),
            ("forwards", _seconds(step.forward_s), f"{plan.setup.algorithm.forwards} over all tokens"),
            ("training", _seconds(step.train_s), ""), ("hand-over", _seconds(step.switch_s), "memory, out and back"),
            ("weights", _seconds(step.sync_s), "to engines on the same devices"),
            ("FLOP", f"{step.flop.total:.3g}", f"and {plan.attention_ratio:.0%} for attention, which is not counted")]


def _waterfall(plan: StepPlan) -> list[Sequence[str]]:
    return [("where the time goes", "share"), *((cause, f"{share:.2%}") for cause, share in plan.waterfall.items())]


def _around(plan: StepPlan) -> list[Sequence[str]]:
    sync, memory = plan.sync, plan.memory
    rows: list[Sequence[str]] = [
        ("beside the step", "", ""),
        ("weight sync", _seconds(plan.sync_s), f"one source {_seconds(sync.single_source_s)}, all sources {_seconds(sync.multi_source_s)}, "
         f"delta {_seconds(sync.delta_s)}; {sync.buckets} buckets"),
        ("hand-off", _seconds(plan.hand_off.total_s), f"{plan.hand_off.bytes_per_gpu / 1e9:.1f} GB a GPU, "
         f"{plan.hand_off.pinned_bytes / 1e9:.0f} GB pinned"),
        ("trainer's states", _gigabytes(memory.states_bytes), f"a GPU, of {_gigabytes(memory.states_limit_bytes)}"),
        ("KV cache", _gigabytes(memory.pool_bytes), f"an engine, beside {_gigabytes(memory.replica_bytes)} of weights a GPU"),
        ("logits", _gigabytes(memory.logits_bytes), "of the longest sequence in float32, unless computed in chunks"),
        ("checkpoint", _gigabytes(plan.checkpoint_bytes), _seconds(plan.checkpoint_s))]
    if plan.staleness:
        shares = ", ".join(f"{age}: {share:.0%}" for age, share in enumerate(plan.staleness.rollouts))
        rows += [("staleness, async", f"{plan.staleness.mean:.2f}", f"of generation alone; {shares}"),
                 ("re-prefill", f"{plan.reprefill_frac:.1%}", "of the step's FLOP")]
    if plan.environments:
        pool = plan.environments
        rows.append(("sandboxes", f"{pool.sandboxes:,.0f}", f"{pool.releasable:,.0f} if given back between turns; {pool.runs:,} runs, "
                     f"{pool.cpu_h:,.0f} CPU·h"))
    return rows


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = {0, len(widths) - 1} if len(widths) > 2 else {0}
    return "\n".join("  ".join(f"{cell:<{width}}" if place in left else f"{cell:>{width}}"
                               for place, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip() for row in rows)


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value < 100 else f"{value:,.0f} s"


def _gigabytes(value: float) -> str:
    return f"{value / 1e9:.3g} GB" if value < 1e12 else f"{value / 1e12:.3g} TB"
