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


Values = Mapping[int, float]
"""By seed."""


class Outcomes:
    """The numbers of all runs that have ended well, by point and seed."""

    def __init__(self, ablation: Ablation) -> None:
        self._ablation = ablation
        self._values: dict[tuple[str, ...], dict[str, dict[int, float]]] = {}

    def add(self, point: Point, seed: int, values: Mapping[str, float | None]) -> None:
        """The numbers of one run; those it does not have are left out."""
        of_point = self._values.setdefault(tuple(point.values()), {})
        for report, value in values.items():
            if value is not None:
                of_point.setdefault(report, {})[seed] = value

    def at(self, point: Point, report: str) -> Values:
        """By seed; empty where no run has ended."""
        return self._values.get(tuple(point.values()), {}).get(report, {})

    def estimate(self, point: Point, report: str) -> Estimate | None:
        """Over seeds; None where no run has ended."""
        return Estimate.of(list(self.at(point, report).values()))

    def differences(self, report: str, *, axis: str) -> list[Difference]:
        """Of each point to that with the axis at its reference, paired by seed: what both share cancels."""
        reference = self._ablation.reference_of(axis)
        found = []
        for point in points_of(self._ablation):
            here, there = self.at(point, report), self.at({**point, axis: reference}, report)
            estimate = Estimate.of([here[seed] - there[seed] for seed in here if seed in there])
            if point[axis] != reference and estimate is not None:
                found.append(Difference(axis, point, reference, report, estimate))
        return found
