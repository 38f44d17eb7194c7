"""The reference: the model a run started from, which the policy may be held to. What a pull does is said in `correction.reference_kl`.

It is loaded from the run's model folder whenever a rank starts, so a restore, a recovery or a resumed run has the same one. Sharded as
the policy is, by the same forward at the same temperatures: before the first update both give the same bits, and a KL of exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.correction.advantages import no_signal
from asyncrl.correction.policy_loss import LossInputs
from asyncrl.correction.ratios import kl_k3, masked_log_ratio
from asyncrl.correction.reference_kl import penalty, reference_kl
from asyncrl.metrics import Metrics
from asyncrl.train.advantages import shaped_rewards
from asyncrl.train.advantages_config import AdvantagesConfig
from asyncrl.train.batch import PackedBatch
from asyncrl.train.config import TrainerConfig
from asyncrl.train.model import Policy, load_policy
from asyncrl.train.parallel import Ranks
from asyncrl.train.ready import make_ready
from asyncrl.train.reference_config import InLoss, InReward, ReferenceConfig


def _as_it_is(_: Policy) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """What stands in for the initial model: a frozen copy, or the policy itself with what it has learnt taken off."""

    policy: Policy
    untrained: Callable[[Policy], AbstractContextManager[None]] = _as_it_is
    """Inside, the forward of `policy` is the initial model's: a copy needs nothing, adapters are switched off."""


def load_reference(folder: Path, ranks: Ranks, *, settings: TrainerConfig) -> Reference:
    """A frozen copy of the model in a folder, this rank's share of it. Every rank calls it."""
    policy = load_policy(folder, chunk_logits=settings.logits_chunk, routing_replay=settings.routing_replay)
    policy.requires_grad_(False)
    make_ready(policy, ranks, settings)
    return Reference(policy)


@dataclass(frozen=True, slots=True, eq=False)
class Pull:
    """A term of the loss, towards the reference."""

    settings: InLoss
    ref_logprobs: Tensor
    """[T]"""
    exclude: Tensor
    """[T] bool, tokens that are left alone."""

    @classmethod
    def of(cls, config: ReferenceConfig, *, ref_logprobs: Tensor | None, batch: PackedBatch, advantages: AdvantagesConfig) -> Pull | None:
        """What the configuration asks for; None where there is no such term."""
        if not isinstance(config, InLoss) or ref_logprobs is None:
            return None
        exclude = np.zeros(len(batch.tokens), np.bool_)
        if config.equal_rewards == "leave":
            silent = no_signal(shaped_rewards(advantages, batch), group_ids=batch.group_ids, valid=batch.valid)
            exclude = silent[batch.rollout_ids[batch.sequence_ids]]
        return cls(config, ref_logprobs=ref_logprobs, exclude=torch.from_numpy(exclude).to(ref_logprobs.device))

    def losses(self, logprobs: Tensor, *, inputs: LossInputs, places: Tensor) -> Tensor:
        """[P] to add to the losses of the tokens at `places`, with gradient."""
        return reference_kl(logprobs, ref_logprobs=self.ref_logprobs[places], inputs=inputs, coefficient=self.settings.coefficient,
                            estimator=self.settings.estimator, exclude=self.exclude[places])


def penalties(config: ReferenceConfig, *, proximal_logprobs: Tensor | None, ref_logprobs: Tensor | None,
              loss_mask: NDArray[np.bool_]) -> NDArray[np.float64] | None:
    """[T] what is added to each token's reward, 0 outside the mask; None where nothing is."""
    if not isinstance(config, InReward):
        return None
    assert proximal_logprobs is not None and ref_logprobs is not None, "TrainConfig asks for both passes"  # noqa: PT018
    mask = torch.from_numpy(loss_mask).to(ref_logprobs.device)
    return penalty(proximal_logprobs, ref_logprobs=ref_logprobs, mask=mask, coefficient=config.coefficient).double().cpu().numpy()


def reference_metrics(logprobs: Tensor, *, ref_logprobs: Tensor, loss_mask: Tensor) -> Metrics:
    """How far the policy is from the reference, over the loss tokens: k1 and k3 of KL(policy ‖ reference), as if it had sampled them."""
    metrics, count = Metrics(), int(loss_mask.sum())
    distance = masked_log_ratio(logprobs, sampled_logprobs=ref_logprobs, mask=loss_mask).double()
    metrics.mean("reference/kl_k1/mean", float(distance.sum()), count=count)
    metrics.mean("reference/kl_k3/mean", float(kl_k3(-distance).sum()), count=count)
    return metrics
