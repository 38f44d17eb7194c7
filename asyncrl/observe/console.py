"""One line a step, readable in a terminal of 120 columns and in a log file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    metric: str
    form: str

    @property
    def width(self) -> int:
        return max(len(self.title), len(format(0.0, self.form)))


_MOST_STALE = "max/K"
_COLUMNS = (
    _Column("reward", "reward/total/mean", "6.3f"),
    _Column("stale", "staleness/token/mean", "5.2f"),
    _Column(_MOST_STALE, "staleness/token/max", "2.0f"),
    _Column("depth", "buffer/depth/last", "5.0f"),
    _Column("ess", "correction/ess/frac", "5.3f"),
    _Column("kept", "correction/kept/frac", "5.3f"),
    _Column("gap", "correction/logprob_gap/mean", "7.1e"),
    _Column("gen tok/s", "rollout/tokens_per_s/last", "9.0f"),
    _Column("idle", "engine/wait_frac/last", "4.0%"),
    _Column("train tok/s", "train/tokens_per_s/last", "11.0f"),
    _Column("idle", "trainer/wait_frac/last", "4.0%"),
    _Column("sync s", "weights/sync_s/mean", "6.3f"),
    _Column("changed", "weights/density/mean", "7.1%"),
    _Column("s/step", "train/period_s/last", "6.2f"),
)

HEADER = "  ".join([" step", *(column.title.rjust(column.width) for column in _COLUMNS)])


def step_line(index: int, metrics: Mapping[str, float], *, max_staleness: int) -> str:
    """The line of one step under `HEADER`; what was not measured shows as a dash."""
    def cell(column: _Column) -> str:
        text = format(metrics[column.metric], column.form) if column.metric in metrics else "-"
        return (f"{text}/{max_staleness}" if column.title == _MOST_STALE else text).rjust(column.width)

    return "  ".join([f"{index:>5}", *map(cell, _COLUMNS)])
