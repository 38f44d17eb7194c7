"""How long answers are: what a plan and a simulation need to know of it.

Every form gives mean, mean square and maximum, and draws. `MeanMax` is the reference's: all answers of the mean, but one of the maximum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property
from statistics import NormalDist
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError
from asyncrl.plan.checks import at_least, whole

_NORMAL = NormalDist()
_GRID = 2048
"""Points of a distribution where it is summed over: errors of the mean stay below 1e-3."""


class Lengths(Protocol):
    """Response lengths in tokens."""

    @property
    def mean_tokens(self) -> float:
        """E[L]."""

    @property
    def mean_square(self) -> float:
        """E[L²]."""

    @property
    def max_tokens(self) -> int:
        """No answer is longer."""

    @property
    def is_reference(self) -> bool:
        """Whether the reference's first-order model is asked for, instead of the corrected one."""

    def sample(self, rng: np.random.Generator, *, groups: int, group_size: int, correlation: float = 0.5) -> NDArray[np.int64]:
        """Lengths [groups, group_size], at least 1; `correlation` of the normal scores within a group (a prompt has its own length)."""

    def quantiles(self, points: int = _GRID) -> NDArray[np.float64]:
        """So many lengths of equal weight [points], ascending: the inverse distribution at midpoints."""

    def quantile(self, share: float) -> float:
        """The length that this share of answers does not exceed."""


def cv2(lengths: Lengths) -> float:
    """Squared coefficient of variation, E[L²]/E[L]² − 1."""
    return lengths.mean_square / lengths.mean_tokens**2 - 1.0


def mean_in_flight_tokens(lengths: Lengths) -> float:
    """Tokens an answer has while it is being written, averaged over time: E[L²]/(2 E[L]).

    An answer of L tokens is in flight for L steps at an average of L/2 tokens; long ones are met more often, in proportion to L.
    """
    return lengths.mean_square / (2.0 * lengths.mean_tokens)


@dataclass(frozen=True)
class MeanMax:
    """The reference's two numbers: every answer as long as the mean, and the barrier waits for one of the maximum."""

    mean_tokens: float
    max_tokens: int

    def __post_init__(self) -> None:
        _check(self.mean_tokens, self.max_tokens)

    @property
    def mean_square(self) -> float:
        """Without spread, mean²."""
        return self.mean_tokens**2

    @property
    def is_reference(self) -> bool:
        """Yes: these two numbers are its mode."""
        return True

    def sample(self, rng: np.random.Generator, *, groups: int, group_size: int, correlation: float = 0.5) -> NDArray[np.int64]:
        """The mean throughout, the last one the maximum."""
        drawn = np.full((groups, group_size), max(1, round(self.mean_tokens)), np.int64)
        drawn[-1, -1] = self.max_tokens
        return drawn

    def quantiles(self, points: int = _GRID) -> NDArray[np.float64]:
        """The mean throughout."""
        return np.full(points, float(self.mean_tokens))

    def quantile(self, share: float) -> float:
        """The mean; the maximum is one answer alone."""
        return float(self.mean_tokens) if share < 1 else float(self.max_tokens)


@dataclass(frozen=True)
class Lognormal:
    """exp(μ + σz), cut at the maximum; μ is such that the mean after the cut is the one asked for."""

    mean_tokens: float
    max_tokens: int
    sigma: float = 0.8
    """Spread of the logarithm; 0.8 at 8 192 of 32 768 is a CV² of 0.67."""

    def __post_init__(self) -> None:
        _check(self.mean_tokens, self.max_tokens)
        at_least(0, strictly=True, sigma=self.sigma)
        if self.mean_tokens == self.max_tokens:
            raise ConfigError("mean_tokens", value=self.mean_tokens, allowed=f"below max_tokens, {self.max_tokens}, with a spread",
                              remedy="Raise max_tokens, or give the mean the run really has.")

    @property
    def is_reference(self) -> bool:
        """No: lengths with a spread are planned by the corrected model."""
        return False

    @cached_property
    def mu(self) -> float:
        """Solved by bisection: the mean after the cut rises with μ."""
        low, high = math.log(self.mean_tokens) - self.sigma**2, math.log(self.max_tokens) + 10 * self.sigma
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if self._cut_moment(1, middle) < self.mean_tokens else (low, middle)
        return (low + high) / 2

    @cached_property
    def mean_square(self) -> float:
        """Of the lengths after the cut."""
        return self._cut_moment(2, self.mu)

    def _cut_moment(self, k: int, mu: float) -> float:
        """E[min(X, M)^k] = e^{kμ+k²σ²/2} Φ(z − kσ) + M^k (1 − Φ(z)), z = (ln M − μ)/σ: the integral below the cut, and the atom at it."""
        z = (math.log(self.max_tokens) - mu) / self.sigma
        below = math.exp(k * mu + (k * self.sigma)**2 / 2) * _NORMAL.cdf(z - k * self.sigma)
        return below + float(self.max_tokens)**k * _NORMAL.cdf(-z)

    def sample(self, rng: np.random.Generator, *, groups: int, group_size: int, correlation: float = 0.5) -> NDArray[np.int64]:
        """Rounded to whole tokens."""
        return self._of_scores(_scores(rng, groups, group_size, correlation))

    def quantiles(self, points: int = _GRID) -> NDArray[np.float64]:
        """Exact at every midpoint."""
        return np.minimum(np.exp(self.mu + self.sigma * _midpoint_scores(points)), float(self.max_tokens))

    def quantile(self, share: float) -> float:
        """Of the lengths after the cut."""
        at_share = math.exp(self.mu + self.sigma * _NORMAL.inv_cdf(share)) if share < 1 else math.inf
        return min(at_share, float(self.max_tokens))

    def _of_scores(self, scores: NDArray[np.float64]) -> NDArray[np.int64]:
        drawn = np.minimum(np.exp(self.mu + self.sigma * scores), float(self.max_tokens))
        return np.maximum(1, np.rint(drawn)).astype(np.int64)


@dataclass(frozen=True)
class Histogram:
    """Lengths as they were seen, and how often."""

    tokens: tuple[int, ...]
    """Ascending, each once."""
    counts: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.tokens or len(self.tokens) != len(self.counts) or list(self.tokens) != sorted(set(self.tokens)):
            raise ConfigError("lengths", value=f"{len(self.tokens)} lengths, {len(self.counts)} counts",
                              allowed="ascending lengths, each once, with as many counts",
                              remedy="Use Histogram.of(lengths) with the lengths of a run's journal.")
        whole(1, **{"lengths.tokens": self.tokens[0]})
        for count in self.counts:
            at_least(0, strictly=True, **{"lengths.counts": count})

    @classmethod
    def of(cls, lengths: NDArray[np.int64] | list[int]) -> Histogram:
        """Of single lengths. Raises ConfigError when there are none."""
        values, counts = np.unique(np.asarray(lengths, np.int64), return_counts=True)
        return cls(tuple(int(value) for value in values), tuple(float(count) for count in counts))

    @property
    def is_reference(self) -> bool:
        """No: lengths with a spread are planned by the corrected model."""
        return False

    @property
    def max_tokens(self) -> int:
        """The longest one seen."""
        return self.tokens[-1]

    @cached_property
    def mean_tokens(self) -> float:
        """Weighted by the counts."""
        return float(np.average(self.tokens, weights=self.counts))

    @cached_property
    def mean_square(self) -> float:
        """Weighted by the counts."""
        return float(np.average(np.square(np.asarray(self.tokens, np.float64)), weights=self.counts))

    def sample(self, rng: np.random.Generator, *, groups: int, group_size: int, correlation: float = 0.5) -> NDArray[np.int64]:
        """Drawn with replacement; groups share a normal score, as those of `Lognormal`."""
        return self._at(_cdf(_scores(rng, groups, group_size, correlation)))

    def quantiles(self, points: int = _GRID) -> NDArray[np.float64]:
        """Of the steps of the distribution, without interpolation."""
        return self._at((np.arange(points) + 0.5) / points).astype(np.float64)

    def quantile(self, share: float) -> float:
        """Of the steps of the distribution."""
        return float(self._at(np.asarray([share]))[0])

    def _at(self, shares: NDArray[np.float64]) -> NDArray[np.int64]:
        ends = np.cumsum(self.counts) / sum(self.counts)
        places = np.minimum(np.searchsorted(ends, shares, side="right"), len(self.tokens) - 1)
        return np.asarray(self.tokens, np.int64)[places]


def _check(mean_tokens: float, max_tokens: int) -> None:
    whole(1, max_tokens=max_tokens)
    at_least(0, strictly=True, mean_tokens=mean_tokens)
    if mean_tokens > max_tokens:
        raise ConfigError("mean_tokens", value=mean_tokens, allowed=f"at most max_tokens, {max_tokens}",
                          remedy="Raise max_tokens, or give the mean after the cut.")


def _scores(rng: np.random.Generator, groups: int, group_size: int, correlation: float) -> NDArray[np.float64]:
    """Standard normal [groups, group_size] with this correlation within a group."""
    shared = rng.standard_normal((groups, 1))
    own = rng.standard_normal((groups, group_size))
    return math.sqrt(correlation) * shared + math.sqrt(1.0 - correlation) * own


@cache
def _midpoint_scores(points: int) -> NDArray[np.float64]:
    return np.array([_NORMAL.inv_cdf((n + 0.5) / points) for n in range(points)])


def _cdf(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Φ, to 1e-5: NumPy has none, so a table of it is interpolated."""
    return np.interp(scores, *_cdf_table())


@cache
def _cdf_table() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    grid = np.linspace(-6.0, 6.0, 2401)
    return grid, np.array([_NORMAL.cdf(float(z)) for z in grid])
