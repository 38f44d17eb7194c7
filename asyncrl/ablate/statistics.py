"""Means over seeds with their standard errors, and differences between points, seed by seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyncrl.ablate.config import Ablation
from asyncrl.ablate.grid import Point, points_of
from asyncrl.ablate.measure import shortened


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds."""

    mean: float
    standard_error: float | None
    """Sample standard deviation (n − 1) over √n; None for one seed."""
    seeds: int
    """n."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate | None:
        """None where there is no value."""
        if not values:
            return None
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
        return cls(shortened(statistics.fmean(values)), None if error is None else shortened(error), len(values))


@dataclass(frozen=True, slots=True)
class Difference:
    """A point against the one that differs from it in one axis alone, there at the reference."""

    axis: str
    point: Point
    reference: str
    """The label the axis has at the other point."""
    report: str
    """Which number."""
    estimate: Estimate
    """Of point − reference, in the number's own unit, over the seeds both have."""


class Outcomes:
    """The numbers of all runs that have ended well, by point and seed."""

    def __init__(self, ablation: Ablation) -> None:
        self._ablation = ablation
        self._values: dict[tuple[str, ...], dict[int, float]] = {}

    def add(self, point: Point, seed: int, values: Mapping[str, float | None]) -> None:
        """The numbers of one run, by the report's names; those it does not have are left out."""
        for report, value in values.items():
            if value is not None:
                self._values.setdefault(self._place(point, report), {})[seed] = value

    def estimate(self, point: Point, report: str) -> Estimate | None:
        """Over seeds; None where no run has ended."""
        return Estimate.of(list(self._at(point, report).values()))

    def difference(self, point: Point, report: str, *, axis: str) -> Estimate | None:
        """Of the point to that with the axis at its reference, seed by seed: what both share cancels. None without a seed both have."""
        here, there = self._at(point, report), self._at({**point, axis: self._ablation.reference_of(axis)}, report)
        return Estimate.of([here[seed] - there[seed] for seed in here if seed in there])

    def differences(self, report: str, *, axis: str) -> list[Difference]:
        """Of every point that is not at the reference of the axis."""
        reference = self._ablation.reference_of(axis)
        return [Difference(axis, point, reference, report, estimate) for point in points_of(self._ablation) if point[axis] != reference
                and (estimate := self.difference(point, report, axis=axis)) is not None]

    def _at(self, point: Point, report: str) -> Mapping[int, float]:
        return self._values.get(self._place(point, report), {})

    def _place(self, point: Point, report: str) -> tuple[str, ...]:
        return (report, *(point[axis] for axis in self._ablation.axes))
