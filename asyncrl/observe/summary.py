"""The numbers a run ends with: `summary.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

EDGE_STEPS = 3
"""`reward_first` and `reward_last` average over so many steps: one lucky batch does not make them, nor what the run learns meanwhile."""


SUMMARY_METRICS = ("step", "reward/total/mean", "reward/rollouts/sum", "rollout/tokens/sum", "staleness/token/max", "buffer/depth/last",
                   "buffer/length_bias/last", "engine/wait_frac/last", "trainer/wait_frac/last", "weights/sync_s/mean",
                   "weights/density/mean")
"""What the summary needs of each row of metrics.jsonl."""


def edge_rewards(rows: Sequence[Mapping[str, float]]) -> tuple[float | None, float | None]:
    """Mean reward over the rollouts of the first and of the last `EDGE_STEPS` steps, each rollout counted once."""
    return _reward(rows[:EDGE_STEPS]), _reward(rows[-EDGE_STEPS:])


def reward_curve(rows: Sequence[Mapping[str, float]]) -> tuple[list[int], list[float]]:
    """Steps and mean rewards, of the steps that have one."""
    known = [(int(row["step"]), row["reward/total/mean"]) for row in rows if "reward/total/mean" in row]
    return [step for step, _ in known], [reward for _, reward in known]


def mean_of(rows: Sequence[Mapping[str, float]], name: str) -> float | None:
    """Mean over the steps that have the metric; None when none has."""
    values = [row[name] for row in rows if name in row]
    return sum(values) / len(values) if values else None


def largest_of(rows: Sequence[Mapping[str, float]], name: str) -> float | None:
    """Largest value over the steps that have the metric; None when none has."""
    return max((row[name] for row in rows if name in row), default=None)


def total_of(rows: Sequence[Mapping[str, float]], name: str) -> float:
    """Sum over the steps."""
    return sum(row.get(name, 0.0) for row in rows)


def last_line(summary: Mapping[str, Any], *, place: str) -> str:
    """A summary in a sentence: what was measured, and the first line of why it ended early."""
    early = f"; ended early: {str(summary['ended_early']).splitlines()[0]}" if summary.get("ended_early") else ""
    pairs = {title: (summary.get(first), summary.get(last)) for title, first, last in
             (("reward", "reward_first", "reward_last"), ("held-out", "eval_before", "eval_after"))}
    curves = "".join(f"{title} {_shown(first)} → {_shown(last)}, " for title, (first, last) in pairs.items()
                     if (first, last) != (None, None))
    return f"{curves}{summary['steps']} steps in {summary['wall_s']:.0f} s; see {place}{early}"


def _shown(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f}"


def _reward(rows: Sequence[Mapping[str, float]]) -> float | None:
    scored = [(row["reward/total/mean"], row["reward/rollouts/sum"]) for row in rows if "reward/total/mean" in row]
    count = sum(weight for _, weight in scored)
    return sum(reward * weight for reward, weight in scored) / count if count else None
