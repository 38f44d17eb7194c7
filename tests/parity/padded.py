"""A padded numerical case [N, L], with anything under its mask, as a packed batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from asyncrl.correction import Corrected, CorrectionBatch, LossInputs, PolicyLoss
from asyncrl.correction.aggregate import Mode, aggregate, count
from asyncrl.correction.losses import decoupled_ppo

Inputs = Mapping[str, Any]


class Padded:
    """A padded case as a packed batch whose rows are all L long."""

    def __init__(self, inputs: Inputs, dtype: torch.dtype) -> None:
        mask = torch.tensor(inputs["mask"], dtype=torch.float64) > 0
        self.inputs, self.dtype, self.shape = inputs, dtype, mask.shape
        sequences, length = mask.shape
        flat = mask.flatten()
        advantages = self.flat("adv") if "adv" in inputs else torch.zeros(len(flat), dtype=dtype)
        self.batch = CorrectionBatch(
            rollout_logprobs=self.flat("behave_logp"), proximal_logprobs=self.flat("prox_logp"), advantages=advantages, loss_mask=flat,
            turn_ids=torch.tensor(inputs["turn_id"]).flatten() if "turn_id" in inputs else torch.zeros(len(flat), dtype=torch.int16),
            policy_versions=torch.zeros(len(flat), dtype=torch.int32),
            cu_seqlens=torch.arange(sequences + 1) * length, group_ids=torch.arange(sequences), version=0)

    def flat(self, name: str) -> Tensor:
        return torch.tensor(self.inputs[name], dtype=self.dtype).flatten()

    def current(self, name: str = "cur_logp") -> Tensor:
        return self.flat(name).requires_grad_()

    def rows(self, packed: Tensor) -> list[list[Any]]:
        return packed.detach().reshape(self.shape).tolist()

    def loss(self, result: PolicyLoss, *, mask: Tensor | None = None) -> Tensor:
        """Token mean (or the case's aggregation) over the tokens of `mask`, by default the loss mask."""
        counted = self.batch.loss_mask if mask is None else mask
        offsets, mode = self.batch.cu_seqlens, mode_of(self.inputs.get("aggregation", "token-mean"))
        return aggregate(result.losses, loss_mask=self.batch.loss_mask, cu_seqlens=offsets, denominators=count(counted, cu_seqlens=offsets),
                         mode=mode)

    def decoupled(self, current: Tensor, corrected: Corrected) -> PolicyLoss:
        return decoupled_ppo(current, inputs=LossInputs.of(self.batch, corrected), clip_low=self.inputs["eps_low"],
                             clip_high=self.inputs["eps_high"])


def mode_of(name: str) -> Mode:
    return name.replace("-", "_")  # type: ignore[return-value]
