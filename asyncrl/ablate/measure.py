"""What a run measured: curves over its steps, and the numbers that the report asks for."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.ablate.config import Measure
from asyncrl.observe.jsonl import iterate_jsonl

_STEPS = 2**63
_MOST_SHOWN = 40
_DIGITS = 7
"""Significant ones that are kept: those of float32."""


class DamagedRows(ValueError):
    """Rows that no run has written as they stand."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric over steps, of the steps that have it and where it is finite."""

    steps: tuple[int, ...]
    values: tuple[float, ...]

    def last(self, steps: int | None, *, of: int) -> Curve:
        """The part of the last so many steps of a run `of` so many; None: all of it."""
        kept = [index for index, step in enumerate(self.steps) if steps is None or step > of - steps]
        return Curve(tuple(self.steps[index] for index in kept), tuple(self.values[index] for index in kept))


@dataclass(frozen=True, slots=True)
class Measured:
    """What one run has to tell."""

    steps: int
    """That it was trained for: fewer than asked for where its prompts ended."""
    curves: Mapping[str, Curve]
    """By metric."""
    values: Mapping[str, float | None]
    """By the report's names; None where no step has the metric."""


def measure(run: Path, *, report: Mapping[str, Measure], curve: str) -> Measured:
    """What the rows of a run's folder say. Raises DamagedRows where they say nothing that can be counted on."""
    try:
        rows = list(iterate_jsonl(run / "metrics.jsonl"))
    except (OSError, RecursionError) as error:
        raise DamagedRows(f"metrics.jsonl cannot be read: {type(error).__name__}") from error
    steps = max((_step(row["trainer_step"]) for row in rows if "trainer_step" in row), default=0)
    names = dict.fromkeys([curve, *(asked.metric for asked in report.values())])
    curves = {name: _curve(rows, name) for name in names}
    return Measured(steps, curves, {label: _reduced(curves[asked.metric].last(asked.last_steps, of=steps), asked.stat)
                                    for label, asked in report.items()})


def known_metrics(run: Path) -> list[str]:
    """The names that any row of a run has."""
    return sorted({name for row in iterate_jsonl(run / "metrics.jsonl") for name in row})


def shortened(value: float) -> float:
    """To the digits a float32 has."""
    return float(json.loads(f"{value:.{_DIGITS}g}"))


def _curve(rows: Iterable[Mapping[str, Any]], name: str) -> Curve:
    """Steps and values; evaluations stand at the step they followed."""
    found = [(_step(row.get("trainer_step", row.get("eval/step/last"))), _finite(name, row[name])) for row in rows
             if row.get(name) is not None]
    return Curve(tuple(step for step, _ in found), tuple(shortened(value) for _, value in found))


def _step(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _STEPS or value != int(value):
        raise DamagedRows(f"a row of metrics.jsonl is of step {str(value)[:_MOST_SHOWN]}")
    return int(value)


def _finite(name: str, value: object) -> float:
    if not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise DamagedRows(f"in a row of metrics.jsonl {name} is no finite number")
    return float(value)


def _reduced(curve: Curve, stat: str) -> float | None:
    values: Sequence[float] = curve.values
    if not values:
        return None
    return shortened({"mean": sum(values) / len(values), "last": values[-1], "max": max(values), "min": min(values)}[stat])
