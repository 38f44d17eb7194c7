"""What top_p, top_k and min_p leave of each row's vocabulary, in the order in which it is applied, that of vLLM."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.types import Sampling

Limits = tuple[float, int, float]
"""top_p, top_k or 0, min_p, after the temperature."""
WHOLE: Limits = (1.0, 0, 0.0)
"""Those that leave everything."""
_ALL_TOKENS = 2**31
"""More than any vocabulary has."""


def limits_of(sampling: Sampling) -> Limits:
    """The limits among the fields of a sampling."""
    return sampling.top_p, sampling.top_k or 0, sampling.min_p


@dataclass(frozen=True, slots=True)
class Truncation:
    """The limits of N rows."""

    top_p: torch.Tensor
    """[N] float64: the fewest likeliest tokens that hold this share of what the others leave; 1 keeps all."""
    top_k: torch.Tensor
    """[N] int64: so many likeliest tokens; the size of the vocabulary keeps all."""
    min_p: torch.Tensor
    """[N] float64: those at least this share as likely as the likeliest."""

    @classmethod
    def of(cls, rows: Iterable[Limits], device: torch.device) -> Truncation | None:
        """None when every row keeps everything."""
        limits = list(rows)
        if all(row == WHOLE for row in limits):
            return None
        top_p, top_k, min_p = zip(*limits, strict=True)
        return cls(torch.tensor(top_p, device=device, dtype=torch.float64),
                   torch.tensor([k or _ALL_TOKENS for k in top_k], device=device), torch.tensor(min_p, device=device, dtype=torch.float64))

    def kept(self, logprobs: torch.Tensor) -> torch.Tensor:
        """[N, V] which tokens may be sampled, of their logprobs."""
        ranked, order = logprobs.double().exp().sort(dim=-1, descending=True, stable=True)
        kept = ranked >= self.min_p[:, None] * ranked[:, :1]
        kept &= torch.arange(ranked.shape[-1], device=ranked.device) < self.top_k[:, None]
        ranked = torch.where(kept, ranked, 0.0)
        likelier = ranked.cumsum(-1) - ranked
        kept &= (likelier < self.top_p[:, None] * ranked.sum(-1, keepdim=True)) | (self.top_p[:, None] >= 1.0)
        return torch.zeros_like(kept).scatter(-1, order, kept)


def renormalised(logprobs: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """[N, V] logprobs over the kept tokens, −inf for the others; rows that keep all stay as they are, to the bit."""
    partial = torch.log_softmax(torch.where(kept, logprobs, -torch.inf), dim=-1)
    return torch.where(kept.all(-1, keepdim=True), logprobs, partial)


def ids_of(kept: torch.Tensor) -> NDArray[np.int32]:
    """The ids of one row's kept set; empty when it is the whole vocabulary."""
    chosen = kept.nonzero()[:, 0]
    return np.empty(0, np.int32) if len(chosen) == len(kept) else chosen.to(torch.int32).cpu().numpy()
