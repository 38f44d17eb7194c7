"""A learning rate that follows how many sequences of a stale batch still speak.

Few large importance weights drown all others: the gradient is then that of a much smaller batch, and deserves its step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from asyncrl.errors import ConfigError, NonFiniteError, ShapeError

Rule = Literal["sqrt", "linear"]


@dataclass(frozen=True, slots=True)
class EssSums:
    """What the effective sample size of one share needs. Add the shares of all ranks: a mean of their sizes is not the size of all."""

    weight_sum: float
    square_sum: float
    count: int
    """B: sequences, those of weight 0 included."""

    @classmethod
    def of(cls, weights: Tensor, *, mask: Tensor | None = None) -> EssSums:
        """Of the importance weights of sequences, [N] float, at least 0; `mask` [N] bool leaves out those without loss tokens.

        Summed in float64: squares of float32 ratios overflow. Waits for the device. Raises ShapeError, and NonFiniteError with the index.
        """
        used = torch.ones_like(weights, dtype=torch.bool) if mask is None else mask
        if weights.dim() != 1 or used.shape != weights.shape or used.dtype != torch.bool:
            raise ShapeError(f"weights and mask (bool) must be [N], got {tuple(weights.shape)}, {tuple(used.shape)} {used.dtype}")
        bad = (used & ~torch.isfinite(weights)).nonzero()
        if len(bad):
            raise NonFiniteError(f"weights[{int(bad[0])}] = {float(weights[bad[0]])}: clamp log-ratios before exp")
        counted = torch.where(used, weights.detach(), 0.0).double()
        weight_sum, square_sum, count = torch.stack([counted.sum(), counted.square().sum(), used.sum().double()]).tolist()
        return cls(weight_sum=weight_sum, square_sum=square_sum, count=int(count))

    def __add__(self, other: EssSums) -> EssSums:
        return EssSums(self.weight_sum + other.weight_sum, self.square_sum + other.square_sum, self.count + other.count)

    @property
    def ess(self) -> float:
        """(Σw)² / Σw², from 1 (one sequence has all the weight) to B (all weigh the same); 0 where all weights are 0."""
        return self.weight_sum**2 / self.square_sum if self.square_sum > 0 else 0.0

    @property
    def ess_frac(self) -> float:
        """ESS / B; 0 for no sequences."""
        return self.ess / self.count if self.count else 0.0


def learning_rate_scale(sums: EssSums, *, base_ess_frac: float = 1.0, rule: Rule = "sqrt") -> float:
    """Factor in [0, 1] of the learning rate: min(1, (ESS / B) / base)^½. VCPO, 2602.17616, equation 5.

    Weights are of whole sequences (the product over tokens), raw: the paper truncates them in the loss and not here, for a truncated
    tail would hide what the size is to show. `sqrt` is the paper's rule for Adam-like optimizers; `linear`, without the root, is the
    authors' option for SGD-like ones. The bound at 1 is ours: a batch better than `base` does not raise the learning rate.
    All weights 0, or no sequences, give 0: nothing was learnt from, and momentum alone should not move the weights.

    >>> ranks = [EssSums.of(torch.tensor([0.2, 0.5])), EssSums.of(torch.tensor([1.0, 4.0]))]
    >>> whole = ranks[0] + ranks[1]
    >>> f"{whole.ess:.4f} of {whole.count}: {learning_rate_scale(whole):.4f}"
    '1.8791 of 4: 0.6854'

    Args:
        sums: of the update, all ranks added.
        base_ess_frac: ESS / B of data that is not stale, in (0, 1]; below 1 where engine and trainer disagree even then.
        rule: see above.

    Raises ConfigError.
    """
    if not 0.0 < base_ess_frac <= 1.0:
        raise ConfigError("base_ess_frac", value=base_ess_frac, allowed="more than 0, at most 1",
                          remedy="It is the ESS, as a share of the batch, of data that is not stale; 1 is that of equal weights.")
    if rule not in ("sqrt", "linear"):
        raise ConfigError("rule", value=rule, allowed="sqrt or linear", remedy="sqrt suits AdamW.")
    share = min(1.0, sums.ess_frac / base_ess_frac)
    return share**0.5 if rule == "sqrt" else share


def ess_scale(weights: Tensor, *, mask: Tensor | None = None, base_ess_frac: float = 1.0, rule: Rule = "sqrt") -> float:
    """`learning_rate_scale` of a batch that lies here as a whole: [N] weights, `mask` as in `EssSums.of`."""
    return learning_rate_scale(EssSums.of(weights, mask=mask), base_ess_frac=base_ess_frac, rule=rule)
