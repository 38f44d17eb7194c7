"""Metrics named `stage/quantity/stat`, each with its reducer declared where it is recorded.

A mean travels as numerator and denominator, so that merging ranks, micro-batches or sources never takes a mean of means.
A mean over nothing is absent from the result, not 0 and not NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Reducer = Literal["mean", "sum", "max", "min", "last"]


class Metrics:
    """A bag of numbers under reduction. Merge with `merge`, read with `result`."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[Reducer, float, float]] = {}

    def mean(self, name: str, total: float, *, count: float) -> None:
        """Add `total` over `count` things to a mean."""
        self._add(name, "mean", float(total), float(count))

    def sum(self, name: str, value: float) -> None:
        """Add to a sum."""
        self._add(name, "sum", float(value), 1.0)

    def max(self, name: str, value: float) -> None:
        """Keep the largest."""
        self._add(name, "max", float(value), 1.0)

    def min(self, name: str, value: float) -> None:
        """Keep the smallest."""
        self._add(name, "min", float(value), 1.0)

    def last(self, name: str, value: float) -> None:
        """Keep the newest."""
        self._add(name, "last", float(value), 1.0)

    def merge(self, other: Metrics) -> None:
        """Take in every value of another bag."""
        for name, (reducer, value, count) in other._values.items():
            self._add(name, reducer, value, count)

    def result(self) -> dict[str, float]:
        """Reduced values by name, sorted by name."""
        items = sorted(self._values.items())
        return {name: value / count if reducer == "mean" else value
                for name, (reducer, value, count) in items if reducer != "mean" or count > 0}

    def to_wire(self) -> dict[str, list[object]]:
        """A form msgpack can carry; `from_wire` gives the bag back."""
        return {name: list(entry) for name, entry in self._values.items()}

    @classmethod
    def from_wire(cls, wire: Mapping[str, list[object]]) -> Metrics:
        """The bag that `to_wire` described."""
        bag = cls()
        for name, (reducer, value, count) in wire.items():
            bag._values[name] = (reducer, value, count)  # type: ignore[assignment]
        return bag

    def _add(self, name: str, reducer: Reducer, value: float, count: float) -> None:
        if name not in self._values:
            self._values[name] = (reducer, value, count)
            return
        known, old, old_count = self._values[name]
        if known != reducer:
            raise ValueError(f"metric {name!r} is reduced by {known!r}, recorded now by {reducer!r}")
        combined = {"mean": old + value, "sum": old + value, "max": max(old, value), "min": min(old, value), "last": value}[reducer]
        self._values[name] = (reducer, combined, old_count + count)
