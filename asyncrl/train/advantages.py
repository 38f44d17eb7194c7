"""The advantage of every token of a batch, by the configured estimator. NumPy only; the formulas are in `correction`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.correction import advantages as groups
from asyncrl.correction.overlong import overlong_penalty
from asyncrl.correction.token_advantages import at_the_end, gae, reinforce_plus_plus
from asyncrl.correction.whitening import whiten
from asyncrl.metrics import Metrics
from asyncrl.train.advantages_config import (
    GAE,
    GRPO,
    OPO,
    RLOO,
    AdvantagesConfig,
    DrGRPO,
    MaxRL,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
)
from asyncrl.train.batch import PackedBatch
from asyncrl.types import NOT_SAMPLED


@dataclass(frozen=True, slots=True, eq=False)
class Earned:
    """What a batch earned, token by token, the same on every rank: each maps the whole batch."""

    advantages: NDArray[np.float32]
    """[T]; what stands outside the loss mask means nothing."""
    returns: NDArray[np.float32] | None = None
    """[T] what a critic should have said; None without one."""


def is_warm_up(config: AdvantagesConfig, *, version: int) -> bool:
    """Whether the step from this version trains the critic alone."""
    return isinstance(config, GAE) and version < config.critic.warm_up_steps


def earn(config: AdvantagesConfig, batch: PackedBatch, *, values: NDArray[np.float32] | None = None,
         penalties: NDArray[np.float64] | None = None) -> Earned:
    """Advantages by the configured estimator, of `values` [T] where it has a critic; `penalties` [T] as `token_advantages`."""
    if not isinstance(config, GAE):
        return Earned(token_advantages(config, batch, penalties=penalties))
    assert values is not None, "gae has a critic"
    found = gae(token_rewards(config, batch, penalties=penalties), values=values, loss_mask=batch.loss_mask, cu_seqlens=batch.cu_seqlens,
                gamma=config.gamma, lam=config.lam)
    advantages = whiten(found.advantages, counts=batch.loss_mask) if config.whiten else found.advantages
    return Earned(advantages.astype(np.float32), returns=found.returns.astype(np.float32))


def token_advantages(config: AdvantagesConfig, batch: PackedBatch, *, penalties: NDArray[np.float64] | None = None) -> NDArray[np.float32]:
    """[T] advantages that rewards alone make.

    With several sequences a rollout, each of them has the rollout's advantage, or its reward at the end. `penalties` [T] are added to the
    rewards of tokens where there are such; elsewhere their sum over a rollout is added to its reward.
    """
    if isinstance(config, ReinforcePlusPlus):
        earned = token_rewards(config, batch, penalties=penalties)
        found = reinforce_plus_plus(earned, loss_mask=batch.loss_mask, cu_seqlens=batch.cu_seqlens, gamma=config.gamma)
    else:
        rewards = shaped_rewards(config, batch) + (0.0 if penalties is None else _sums_of(batch, penalties))
        found = _of_rollouts(config, rewards, batch=batch)[batch.rollout_ids[batch.sequence_ids]]
    return found.astype(np.float32)


def token_rewards(config: AdvantagesConfig, batch: PackedBatch, *, penalties: NDArray[np.float64] | None) -> NDArray[np.float64]:
    """[T] each rollout's reward at the last loss token of its sequences, and each token's own penalty."""
    rewards = shaped_rewards(config, batch)[batch.rollout_ids]
    return at_the_end(rewards, loss_mask=batch.loss_mask, cu_seqlens=batch.cu_seqlens) + (0.0 if penalties is None else penalties)


def shaped_rewards(config: AdvantagesConfig, batch: PackedBatch) -> NDArray[np.float64]:
    """[R] rewards and what length costs."""
    overlong = overlong_penalties(config, batch)
    return batch.rewards.astype(np.float64) + (0.0 if overlong is None else overlong)


def overlong_penalties(config: AdvantagesConfig, batch: PackedBatch) -> NDArray[np.float64] | None:
    """[R] what is added to each reward for its sampled tokens, at most 0; None where length costs nothing."""
    if isinstance(config, MaxRL) or config.overlong.kind == "none":
        return None
    settings, lengths = config.overlong, _sums_of(batch, batch.policy_versions != NOT_SAMPLED)
    return settings.weight * overlong_penalty(lengths, max_tokens=settings.max_tokens, cache_tokens=settings.cache_tokens)


def shaping_metrics(config: AdvantagesConfig, batch: PackedBatch, *, penalties: NDArray[np.float64] | None = None) -> Metrics:
    """What rewards lost to length and to the [T] penalties, over the rollouts without error; nothing where that costs nothing."""
    metrics, lost = Metrics(), {"train/overlong_penalty/mean": overlong_penalties(config, batch)}
    lost["reference/penalty/mean"] = None if penalties is None else _sums_of(batch, penalties)
    for name, of_rollouts in lost.items():
        if of_rollouts is not None:
            metrics.mean(name, float(of_rollouts[batch.valid].sum()), count=int(batch.valid.sum()))
    return metrics


def _of_rollouts(config: GRPO | DrGRPO | RLOO | MaxRL | OPO | ReinforcePlusPlusBaseline, rewards: NDArray[np.float64], *,
                 batch: PackedBatch) -> NDArray[np.float64]:
    """[R]"""
    ids, valid, lengths = batch.group_ids, batch.valid, _sums_of(batch, batch.loss_mask)
    match config:
        case GRPO():
            return groups.grpo(rewards, group_ids=ids, valid=valid, unbiased_std=config.unbiased_std)
        case DrGRPO():
            return groups.dr_grpo(rewards, group_ids=ids, valid=valid)
        case RLOO():
            return groups.rloo(rewards, group_ids=ids, valid=valid)
        case MaxRL():
            return groups.maxrl(rewards, group_ids=ids, valid=valid)
        case OPO():
            return groups.opo(rewards, group_ids=ids, valid=valid, lengths=lengths)
        case ReinforcePlusPlusBaseline():
            return groups.reinforce_plus_plus_baseline(rewards, group_ids=ids, valid=valid, lengths=lengths)


def _sums_of(batch: PackedBatch, values: NDArray[np.bool_ | np.float64]) -> NDArray[np.float64]:
    """[R] sums over the tokens of each rollout."""
    return np.bincount(batch.rollout_ids[batch.sequence_ids], weights=values, minlength=len(batch.rewards))
