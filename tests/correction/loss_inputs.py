"""`LossInputs` from what a test cares about; the rest is one sequence, weight 1, nothing dropped."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.correction import LossInputs


def loss_inputs(advantages: Tensor, *, proximal_logprobs: Tensor | None = None, rollout_logprobs: Tensor | None = None,
                weights: Tensor | None = None, keep_mask: Tensor | None = None, counted: Tensor | None = None,
                cu_seqlens: Tensor | None = None) -> LossInputs:
    """All [T] like `advantages`; logprobs are 0 where not given, or those of the other policy."""
    anchor = next((given for given in (proximal_logprobs, rollout_logprobs) if given is not None), torch.zeros_like(advantages))
    keep = torch.ones(len(advantages), dtype=torch.bool) if keep_mask is None else keep_mask
    return LossInputs(rollout_logprobs=anchor if rollout_logprobs is None else rollout_logprobs,
                      proximal_logprobs=anchor if proximal_logprobs is None else proximal_logprobs, advantages=advantages,
                      weights=torch.ones_like(advantages) if weights is None else weights, keep_mask=keep,
                      counted=keep if counted is None else counted,
                      cu_seqlens=torch.tensor([0, len(advantages)]) if cu_seqlens is None else cu_seqlens)
