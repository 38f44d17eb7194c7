"""M2PO's bound on the second moment of log-ratios. 2510.01161."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.correction.ratios import pushes_away


@torch.no_grad()
def second_moment_mask(log_ratio: Tensor, *, mask: Tensor, limit: float) -> Tensor:
    """[T] bool, `mask` without the tokens of largest ℓ², so that the mean ℓ² of the rest is below `limit`.

    Tokens of equal ℓ² share their fate, so the order of a batch does not matter; those of the smallest ℓ² always stay.
    """
    squares = torch.where(mask, log_ratio.double().square(), torch.inf)
    ordered = squares[mask].sort().values
    if not len(ordered):
        return mask
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=mask.device)
    fits = (means < limit).sum()
    beyond = torch.cat([ordered, ordered.new_full((1,), torch.inf)])[fits]
    # A NaN sorts last and is never dropped in silence.
    return mask & ~(squares >= beyond) | (mask & (squares <= ordered[0])) | (mask & squares.isnan())


@torch.no_grad()
def second_moment_tau(log_ratio: Tensor, *, advantages: Tensor, mask: Tensor, limit: float, exact: bool = True) -> Tensor:
    """τ ≥ 0, a scalar, with Σ min(ℓ², τ²) = limit · n over the n harmful tokens of `mask`: those with ℓ · A > 0.

    Infinity where the bound holds without it. `exact=False` is the authors' code: the largest |ℓ| of a harmful token for which the
    sum stays below the budget, or 0 without one.
    """
    squares = log_ratio.double().square()[pushes_away(log_ratio, advantages=advantages, mask=mask)].sort().values
    budget = limit * len(squares)
    if not len(squares) or float(squares.sum()) <= budget:
        return squares.new_tensor(torch.inf)
    before = squares.cumsum(0) - squares
    rest = torch.arange(len(squares), 0, -1, device=squares.device, dtype=torch.float64)
    at_value = before + rest * squares
    if not exact:
        return torch.where(at_value < budget, squares, 0.0).max().sqrt()
    first = int((at_value < budget).sum())  # the sums rise, and the last of them is over the budget
    return ((budget - before[first]) / rest[first]).sqrt()
