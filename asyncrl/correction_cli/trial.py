"""What a correction would do to recorded batches: how much it truncates, masks and rejects, by staleness and by length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from asyncrl.correction.batch import CorrectionBatch
from asyncrl.correction.buckets import EXACT_BUCKETS, ess_frac
from asyncrl.correction.rejection import outside_ratios
from asyncrl.correction.spec import Correction
from asyncrl.correction.weights import apply
from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Share:
    """Loss tokens of one kind, and what became of them. kept + masked + rejected = tokens."""

    tokens: int = 0
    kept: int = 0
    truncated: int = 0
    """Of those kept: their weight was raised or lowered to a bound."""
    masked: int = 0
    """Dropped, because the ratio their weight is made of is out of bounds."""
    rejected: int = 0
    """Dropped by a rule alone."""
    weight_sum: float = 0.0
    weight_square_sum: float = 0.0
    gap_sum: float = 0.0
    """Of |ℓ|, nats."""

    def __add__(self, other: Share) -> Share:
        return Share(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    @property
    def ess_frac(self) -> float | None:
        """(Σw)² / (n Σw²); None where every weight is 0."""
        return ess_frac(self.weight_sum, squares=self.weight_square_sum, count=self.tokens) if self.weight_square_sum else None


@dataclass(frozen=True, slots=True)
class Trial:
    """What one correction does to some batches."""

    batches: int
    sequences: int
    """With loss tokens."""
    dropped_sequences: int
    """Of these, no token is left."""
    whole: Share
    by_staleness: dict[int, Share]
    """Steps; the last is for all that are older."""
    by_length: dict[tuple[int, int], Share]
    """First and last number of loss tokens of a token's sequence."""
    by_rule: dict[str, int]
    """Tokens that each rule drops, whatever else drops them."""


def has_finite_sums(batch: CorrectionBatch) -> bool:
    """Whether no sum of log ratios over loss tokens, of a turn, a sequence or all, can overflow in their dtype."""
    return bool(torch.isfinite((batch.proximal_logprobs - batch.rollout_logprobs)[batch.loss_mask].abs().sum()))


def attempt(batches: Sequence[CorrectionBatch], correction: Correction) -> Trial:
    """Correct each batch as a step of its own. Raises ConfigError for a correction whose weights recorded data do not determine."""
    if correction.proximal == "log_linear":
        raise ConfigError("correction.proximal", value="log_linear", allowed="recompute",
                          remedy="Log-linear weights depend on the current logprobs of each update, which no recording has.")
    cuts = [_cut(batch, correction) for batch in batches]
    lengths = torch.cat([cut.lengths for cut in cuts])
    buckets = _length_buckets(int(lengths.max()) if len(lengths) else 1)
    ages = range(EXACT_BUCKETS + 2)
    by_staleness = {age: _total(cut.share(cut.staleness == age) for cut in cuts) for age in ages}
    by_length = {(low, high): _total(cut.share((cut.lengths >= low) & (cut.lengths <= high)) for cut in cuts) for low, high in buckets}
    rules = [rule.name for rule in correction.reject]
    return Trial(batches=len(batches), sequences=sum(cut.sequences for cut in cuts), dropped_sequences=sum(cut.dropped for cut in cuts),
                 whole=_total(cut.share(torch.ones_like(cut.kept)) for cut in cuts),
                 by_staleness={age: share for age, share in by_staleness.items() if share.tokens},
                 by_length={bucket: share for bucket, share in by_length.items() if share.tokens},
                 by_rule={name: sum(int(cut.by_rule[name]) for cut in cuts) for name in rules})


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """The loss tokens of one batch, [n] each."""

    kept: Tensor
    truncated: Tensor
    masked: Tensor
    weights: Tensor
    gaps: Tensor
    staleness: Tensor
    lengths: Tensor
    sequences: int
    dropped: int
    by_rule: dict[str, int]

    def share(self, chosen: Tensor) -> Share:
        weights, masked = self.weights[chosen], self.masked[chosen]
        kept = self.kept[chosen]
        return Share(tokens=int(chosen.sum()), kept=int(kept.sum()), truncated=int(self.truncated[chosen].sum()), masked=int(masked.sum()),
                     rejected=int((~kept & ~masked).sum()), weight_sum=float(weights.sum()),
                     weight_square_sum=float(weights.square().sum()), gap_sum=float(self.gaps[chosen].sum()))


def _cut(batch: CorrectionBatch, correction: Correction) -> _Cut:
    weighed, mask = apply(batch, correction), batch.loss_mask
    corrected, log_ratio = weighed.corrected, weighed.level_log_ratio
    truncated = outside_ratios(log_ratio, low=correction.truncate_low, high=correction.truncate_high, batch=batch)[mask]
    masked = outside_ratios(log_ratio, low=correction.mask_low, high=correction.mask_high, batch=batch)[mask]
    kept = corrected.keep_mask[mask]
    sequence = torch.arange(len(batch.group_ids)).repeat_interleave(batch.cu_seqlens.diff(), output_size=len(mask))[mask]
    lengths = torch.bincount(sequence, minlength=len(batch.group_ids))
    left = torch.bincount(sequence[kept], minlength=len(batch.group_ids))
    return _Cut(kept=kept, truncated=truncated & kept, masked=masked, weights=corrected.weights[mask].double(),
                gaps=(batch.proximal_logprobs - batch.rollout_logprobs)[mask].double().abs(),
                staleness=(batch.version - batch.policy_versions[mask]).clamp(max=EXACT_BUCKETS + 1), lengths=lengths[sequence],
                sequences=int((lengths > 0).sum()), dropped=int(((lengths > 0) & (left == 0)).sum()),
                by_rule={name: int(dropped.sum()) for name, dropped in weighed.rejected.items()})


def _total(shares: Iterator[Share]) -> Share:
    return sum(shares, Share())


def _length_buckets(longest: int) -> list[tuple[int, int]]:
    """Eight at most, of which each ends at a power of two times the one before."""
    highs = [longest]
    while highs[0] > 1 and len(highs) < 8:
        highs.insert(0, -(-highs[0] // 2))
    return list(zip([1, *(high + 1 for high in highs)], highs, strict=False))
