"""What the total gap between engine and trainer is made of: mismatch at equal version, and what the policy drifted since.

    ℓ = proximal − rollout = mismatch + drift
    mismatch = same − rollout       same: the trainer's logprob under the very version that sampled the token
    drift    = proximal − same

Where `same` is computed the split is exact, token by token: `split_gap`. It costs a forward with old weights, so a step estimates it
instead: tokens of staleness 0 have no drift, and their gap is mismatch alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncrl.correction.buckets import Summary, on_host
from asyncrl.correction.ratios import masked_log_ratio


@dataclass(frozen=True, slots=True, eq=False)
class GapSplit:
    """Log-ratios [T], 0 where not a loss token; detached."""

    mismatch: Tensor
    drift: Tensor

    @property
    def total(self) -> Tensor:
        """[T] ℓ, their sum."""
        return self.mismatch + self.drift


@torch.no_grad()
def split_gap(rollout_logprobs: Tensor, *, same_version_logprobs: Tensor, proximal_logprobs: Tensor, loss_mask: Tensor) -> GapSplit:
    """Exact split of the log-ratios of [T] tokens. Raises ShapeError."""
    return GapSplit(
        mismatch=masked_log_ratio(same_version_logprobs, sampled_logprobs=rollout_logprobs, mask=loss_mask),
        drift=masked_log_ratio(proximal_logprobs, sampled_logprobs=same_version_logprobs, mask=loss_mask))


def mean_gap_by_staleness(log_ratio: Tensor, *, staleness: Tensor, loss_mask: Tensor) -> dict[int, float]:
    """Mean |ℓ| of the loss tokens of each staleness there is, from [T] tensors. Waits for the device."""
    mask = on_host(loss_mask)
    ages, number_of = np.unique(on_host(staleness)[mask], return_inverse=True)
    totals = np.bincount(number_of, weights=np.abs(on_host(log_ratio)[mask], dtype=np.float64))
    return dict(zip(ages.tolist(), (totals / np.bincount(number_of)).tolist(), strict=True))


def estimated_split(fresh: Summary | None, *, whole: Summary, mean_staleness: float) -> dict[str, float]:
    """`gap_by_mismatch`, `gap_by_drift`, `gap_drift_per_version` of a batch from its tokens of staleness 0; nothing where all are stale.

    With g the mean |ℓ| over all tokens and g0 over those of staleness 0: mismatch g0, drift g − g0, and per version that over the
    mean staleness, NaN where that is 0. Takes stale tokens to have the mismatch of the others. As |m + d| ≤ |m| + |d|, this is the
    least that the drift can be; noise may make it negative.
    """
    if fresh is None:
        return {}
    mismatch = fresh.mean("logprob_gap/mean")
    drift = whole.mean("logprob_gap/mean") - mismatch
    return {"gap_by_mismatch/value": mismatch, "gap_by_drift/value": drift,
            "gap_drift_per_version/value": drift / mean_staleness if mean_staleness else math.nan}
