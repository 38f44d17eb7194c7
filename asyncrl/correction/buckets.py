"""Loss tokens by staleness, and statistics of them that add up: those of a batch are the sum of those of its buckets.

In float64 and on the host: a step's tokens are a few MB, and NumPy sorts them ten times as fast as torch does on a CPU. Bucket after
bucket, because what is computed of a few thousand tokens at a time stays in the cache.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.metrics import Metrics

EXACT_BUCKETS = 8
"""Staleness up to here has a bucket of its own, older tokens share one: runs allow 0 to 8 steps, and names stay few."""

Values = NDArray[Any]


def on_host(tensor: Tensor) -> Values:
    """As an array, without a copy where it is one already; bfloat16, which NumPy has not, as float32."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def by_staleness(loss_mask: Tensor, staleness: Tensor) -> dict[str, NDArray[np.int64]]:
    """Places of the loss tokens of each staleness that occurs, "0" to "8" and "9_plus". From [T] bool and [T] integers."""
    oldest, ages = EXACT_BUCKETS + 1, on_host(staleness)
    numbers = np.where(on_host(loss_mask), ages.clip(0, oldest).astype(np.int8), np.int8(-1))
    # Neighbours are nearly always of one staleness: what has to be sorted is the few runs of them.
    begins = np.ones(len(numbers), dtype=np.bool_)
    np.not_equal(numbers[1:], numbers[:-1], out=begins[1:])
    starts = np.flatnonzero(begins)
    order = numbers[starts].argsort(kind="stable")
    starts, lengths = starts[order], np.diff(starts, append=len(numbers))[order]
    places = np.arange(len(numbers)) + np.repeat(starts - (lengths.cumsum() - lengths), lengths)
    sizes = np.bincount(numbers[starts] + 1, weights=lengths, minlength=oldest + 2).astype(np.int64)
    pieces = np.split(places, sizes.cumsum()[:-1])[1:]
    return {(f"{number}_plus" if number == oldest else f"{number}"): piece for number, piece in enumerate(pieces) if len(piece)}


@dataclass(frozen=True, slots=True, eq=False)
class Summary:
    """Statistics of n tokens. Add those of disjoint tokens. Names are those of metrics, `QUANTITY/STAT`, without the stage."""

    count: int = 0
    means: dict[str, float] = field(default_factory=dict)
    """Sums over the tokens, to be divided by their number."""
    products: dict[str, float] = field(default_factory=dict)
    """Sums of squares, by any name."""
    largest: dict[str, float] = field(default_factory=dict)
    smallest: dict[str, float] = field(default_factory=dict)
    samples: dict[str, tuple[Values, ...]] = field(default_factory=dict)
    """By quantity, [n] values in pieces: what quantiles are of."""
    spreads: dict[str, Spread] = field(default_factory=dict)
    """By any name."""

    def __add__(self, other: Summary) -> Summary:
        """Of the tokens of both."""
        return Summary(self.count + other.count, _merged(self.means, other.means, how=operator.add),
                       _merged(self.products, other.products, how=operator.add), _merged(self.largest, other.largest, how=max),
                       _merged(self.smallest, other.smallest, how=min), _merged(self.samples, other.samples, how=operator.add),
                       _merged(self.spreads, other.spreads, how=operator.add))

    def joined(self, other: Summary) -> Summary:
        """What two summaries say of the same tokens, under different names."""
        return Summary(self.count, self.means | other.means, self.products | other.products, self.largest | other.largest,
                       self.smallest | other.smallest, self.samples | other.samples, self.spreads | other.spreads)

    def mean(self, name: str) -> float:
        """Of something in `means`."""
        return self.means[name] / self.count

    def record(self, metrics: Metrics, *, suffix: str = "") -> None:
        """Under `correction/QUANTITY{suffix}/STAT`, but for the products: whoever summed them knows what of."""
        for name, total in self.means.items():
            metrics.mean(_name(name, suffix), total, count=self.count)
        for name, value in self.largest.items():
            metrics.max(_name(name, suffix), value)
        for name, value in self.smallest.items():
            metrics.min(_name(name, suffix), value)
        for quantity, pieces in self.samples.items():
            found = quantiles(*pieces, levels=tuple(QUANTILES.values()))
            record_finished(metrics, {f"{quantity}/{stat}": value for stat, value in zip(QUANTILES, found, strict=True)}, suffix=suffix)


QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}


def record_finished(metrics: Metrics, values: Mapping[str, float], *, suffix: str = "") -> None:
    """Numbers that are no mean and no extreme; NaN is left out."""
    for name, value in values.items():
        if not math.isnan(value):
            metrics.last(_name(name, suffix), value)


def quantiles(*pieces: Values, levels: tuple[float, ...]) -> list[float]:
    """Quantiles of all values of [n] pieces together, with linear interpolation, for any n."""
    ordered = np.concatenate(pieces)
    ordered.sort()
    places = np.array(levels) * (len(ordered) - 1)
    below, above = (ordered[whole.astype(np.int64)].astype(np.float64) for whole in (np.floor(places), np.ceil(places)))
    return (below + (above - below) * (places % 1.0)).tolist()


def ess_frac(total: float, *, squares: float, count: int) -> float:
    """Effective sample size over sample size, (Σw)² / (n Σw²); NaN when all weights are 0. Kong 1992."""
    return total**2 / (count * squares) if squares > 0 else math.nan


@dataclass(frozen=True, slots=True, eq=False)
class Spread:
    """How r quantities of n tokens vary together, without a difference of large sums. Add those of disjoint tokens: Chan et al. 1979."""

    count: int
    means: NDArray[np.float64]
    """[r]."""
    scatter: NDArray[np.float64]
    """[r, r] Σ (x − mean)(y − mean)."""

    @classmethod
    def of(cls, *rows: Values) -> Spread:
        """Of [n] values each, n > 0."""
        values = np.stack(rows).astype(np.float64)
        means = values.mean(axis=1)
        values -= means[:, None]
        return cls(values.shape[1], means, values @ values.T)

    def __add__(self, other: Spread) -> Spread:
        """Of the tokens of both."""
        count, apart = self.count + other.count, other.means - self.means
        between = np.outer(apart, apart) * (self.count * other.count / count)
        return Spread(count, self.means + apart * (other.count / count), self.scatter + other.scatter + between)

    def deviation(self, row: int) -> float:
        """Standard deviation over n − 1; NaN when n < 2."""
        return math.sqrt(self.scatter[row, row] / (self.count - 1)) if self.count > 1 else math.nan

    def pearson(self, one: int, other: int) -> float:
        """Correlation; NaN when one of the two is constant within rounding, or n < 2."""
        squares = self.scatter[[one, other], [one, other]]
        if np.any(squares <= self.count * (_ROUNDING * self.means[[one, other]]) ** 2):
            return math.nan
        return min(1.0, max(-1.0, float(self.scatter[one, other] / math.prod(np.sqrt(squares)))))


_ROUNDING = 1e-15
"""Relative deviation of equal values from their mean: what their sum, rounded, leaves of each."""


def _merged(one: dict[str, Any], other: dict[str, Any], *, how: Any) -> dict[str, Any]:
    return {name: how(one[name], other[name]) if name in one and name in other else (one | other)[name] for name in one | other}


def _name(name: str, suffix: str) -> str:
    quantity, stat = name.split("/")
    return f"correction/{quantity}{suffix}/{stat}"
