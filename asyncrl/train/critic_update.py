"""The critic's share of a step: as many updates as its epochs have minibatches, towards returns that were fixed before the first.

Every loss token counts alike, whatever a correction makes of its policy gradient: a return is what came, however likely it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.correction.value_loss import value_loss
from asyncrl.metrics import Metrics
from asyncrl.train.critic import TrainedCritic
from asyncrl.train.minibatch import Minibatch
from asyncrl.train.optim import Update
from asyncrl.train.parallel import Ranks


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """What a critic learns of a batch."""

    values: Tensor
    """[T] its own, before the step."""
    returns: Tensor
    """[T] what they should have been."""
    loss_mask: Tensor
    """[T] bool"""


@dataclass(frozen=True, slots=True, eq=False)
class Learnt:
    """What the critic's updates did; the same on every rank."""

    metrics: Metrics
    applied: int
    """Updates."""
    nonfinite: bool
    """A gradient was NaN or infinite; its update was not applied."""


def train_critic(critic: TrainedCritic, minibatches: Sequence[Minibatch], *, targets: Targets, ranks: Ranks, version: int) -> Learnt:
    """Every epoch of the critic; the denominators of the minibatches count all loss tokens."""
    rows = torch.zeros(2, len(targets.values), device=targets.values.device)
    updates: list[Update] = []
    critic.model.zero_grad()  # what a step that failed half-way may have left
    for _ in range(critic.settings.epochs):
        for minibatch in minibatches:
            factor = ranks.world_size / max(1, minibatch.denominators.num_loss_tokens)
            for inputs in minibatch.microbatches():
                loss = value_loss(critic.model(inputs), old_values=targets.values[inputs.places], returns=targets.returns[inputs.places],
                                  clip=critic.settings.value_clip)
                (loss.losses.sum() * factor).backward()
                rows[:, inputs.places] = torch.stack([loss.losses.detach(), loss.clipped.float()])
            updates.append(critic.optimizer.update(version=version))
    losses, clipped = ranks.sum(rows)
    nonfinite = any(update.skipped == "nonfinite" for update in updates)
    applied = sum(update.skipped is None for update in updates)
    metrics = Metrics()
    metrics.sum("critic/updates/sum", applied)
    if not nonfinite:
        _record(metrics, losses, clipped=clipped, targets=targets)
        metrics.last("critic/grad_norm/last", updates[-1].grad_norm)
    return Learnt(metrics, applied=applied, nonfinite=nonfinite)


def _record(metrics: Metrics, losses: Tensor, *, clipped: Tensor, targets: Targets) -> None:
    mask, count = targets.loss_mask, int(targets.loss_mask.sum())
    values, returns = targets.values[mask].double(), targets.returns[mask].double()
    for name, numbers in (("value_loss", losses[mask]), ("values", values), ("returns", returns)):
        metrics.mean(f"critic/{name}/mean", float(numbers.double().sum()), count=count)
    metrics.mean("critic/clipped/frac", float(clipped[mask].sum()), count=count)
    spread = float(returns.var(correction=0))
    if spread > 0.0:
        metrics.last("critic/explained_variance/last", 1.0 - float((returns - values).var(correction=0)) / spread)
