"""Mean 0 and variance 1 over a whole batch, however it is spread over ranks. NumPy only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from asyncrl.errors import NonFiniteError, ShapeError

TOLERANCE = 1e-6
"""Above the rounding of float32 rewards of order 1, below any difference a reward function means."""
EPSILON = 1e-8
"""Inside the root, as verl and OpenRLHF have it."""


@dataclass(frozen=True, slots=True)
class Moments:
    """What whitening needs to know of one share of a batch. Add the shares of all ranks before whitening any of them."""

    count: float
    mean: float
    """0 for no values."""
    squares: float
    """Σ (x − mean)²: sums of plain squares would cancel."""
    low: float
    """Infinity for no values."""
    high: float

    @classmethod
    def of(cls, values: ArrayLike, *, counts: ArrayLike) -> Moments:
        """Of [K] values, each taken `counts` times: a mask [K] bool, or numbers [K]; a value of count 0 may be anything.

        Raises ShapeError for unequal lengths or a negative count, NonFiniteError for a value that counts and is NaN or infinite.
        """
        kept, weights = _counted(values, counts)
        if not len(kept):
            return cls(count=0.0, mean=0.0, squares=0.0, low=np.inf, high=-np.inf)
        mean = float(np.average(kept, weights=weights))
        return cls(count=float(weights.sum()), mean=mean, squares=float((weights * (kept - mean) ** 2).sum()),
                   low=float(kept.min()), high=float(kept.max()))

    def __add__(self, other: Moments) -> Moments:
        count = self.count + other.count
        if count == 0.0:
            return self
        gap, share = other.mean - self.mean, other.count / count
        return Moments(count=count, mean=self.mean + gap * share,
                       squares=self.squares + other.squares + gap**2 * self.count * share,
                       low=min(self.low, other.low), high=max(self.high, other.high))

    @property
    def variance(self) -> float:
        """Unbiased; 0 for at most one value."""
        return self.squares / (self.count - 1) if self.count > 1 else 0.0


def whiten(values: ArrayLike, *, counts: ArrayLike, moments: Moments | None = None, epsilon: float = EPSILON,
           tolerance: float = TOLERANCE) -> NDArray[np.float64]:
    """[K] (x − mean) / √(variance + epsilon), with the unbiased variance; 0 where `counts` is.

    Values that differ by no more than `tolerance`, a single one among them, give exactly 0 instead of rounding divided by rounding.

    Args:
        values: [K]
        counts: a mask [K] bool, or how often each value counts [K].
        moments: of the global batch where these values are a share of it; None: they are all.
        epsilon: keeps the quotient finite.
        tolerance: max − min of equal values.

    Raises ShapeError, NonFiniteError as `Moments.of`.
    """
    own = Moments.of(values, counts=counts)
    whole = own if moments is None else moments
    used = np.asarray(counts) > 0
    if whole.high - whole.low <= tolerance or whole.count <= 1:
        return np.zeros(used.shape)
    return np.where(used, (np.where(used, values, 0.0) - whole.mean) / np.sqrt(whole.variance + epsilon), 0.0)


def _counted(values: ArrayLike, counts: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The values that count, and how often each does."""
    numbers, weights = np.asarray(values, np.float64), np.asarray(counts, np.float64)
    if numbers.shape != weights.shape or numbers.ndim != 1:
        raise ShapeError(f"values and counts must be [K], got {numbers.shape}, {weights.shape}")
    if not (weights >= 0).all() or not np.isfinite(weights).all():
        raise ShapeError(f"counts must be a mask, or finite numbers of at least 0, got {weights[~(weights >= 0) | np.isinf(weights)][0]}")
    used = weights > 0
    bad = np.flatnonzero(used & ~np.isfinite(numbers))
    if len(bad):
        raise NonFiniteError(f"values[{bad[0]}] = {numbers[bad[0]]} counts, and must be finite")
    return numbers[used], weights[used]
