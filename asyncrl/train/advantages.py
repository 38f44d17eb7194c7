"""The advantage of every token of a batch, by the configured estimator. NumPy only; the formulas are in `correction`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from asyncrl.correction import advantages as groups
from asyncrl.correction.overlong import overlong_penalty
from asyncrl.correction.token_advantages import at_the_end, reinforce_plus_plus
from asyncrl.metrics import Metrics
from asyncrl.train.advantages_config import GRPO, OPO, RLOO, AdvantagesConfig, DrGRPO, MaxRL, ReinforcePlusPlus, ReinforcePlusPlusBaseline
from asyncrl.train.batch import PackedBatch
from asyncrl.types import NOT_SAMPLED


def token_advantages(config: AdvantagesConfig, batch: PackedBatch) -> NDArray[np.float32]:
    """[T] advantages, the same on every rank: each maps the whole batch. What stands outside the loss mask means nothing.

    With several sequences a rollout, each of them has the rollout's advantage, or its reward at the end.
    """
    penalties = overlong_penalties(config, batch)
    rewards = batch.rewards.astype(np.float64) + (0.0 if penalties is None else penalties)
    if isinstance(config, ReinforcePlusPlus):
        earned = at_the_end(rewards[batch.rollout_ids], loss_mask=batch.loss_mask, cu_seqlens=batch.cu_seqlens)
        found = reinforce_plus_plus(earned, loss_mask=batch.loss_mask, cu_seqlens=batch.cu_seqlens, gamma=config.gamma)
    else:
        found = _of_rollouts(config, rewards, batch=batch)[batch.rollout_ids[batch.sequence_ids]]
    return found.astype(np.float32)


def overlong_penalties(config: AdvantagesConfig, batch: PackedBatch) -> NDArray[np.float64] | None:
    """[R] what is added to each reward for its sampled tokens, at most 0; None where length costs nothing."""
    if isinstance(config, MaxRL) or config.overlong.kind == "none":
        return None
    settings, lengths = config.overlong, _tokens_of(batch, batch.policy_versions != NOT_SAMPLED)
    return settings.weight * overlong_penalty(lengths, max_tokens=settings.max_tokens, cache_tokens=settings.cache_tokens)


def shaping_metrics(config: AdvantagesConfig, batch: PackedBatch) -> Metrics:
    """What rewards lost to length, over the rollouts without error; nothing where length costs nothing."""
    metrics, penalties = Metrics(), overlong_penalties(config, batch)
    if penalties is not None:
        metrics.mean("train/overlong_penalty/mean", float(penalties[batch.valid].sum()), count=int(batch.valid.sum()))
    return metrics


def _of_rollouts(config: GRPO | DrGRPO | RLOO | MaxRL | OPO | ReinforcePlusPlusBaseline, rewards: NDArray[np.float64], *,
                 batch: PackedBatch) -> NDArray[np.float64]:
    """[R]"""
    ids, valid, lengths = batch.group_ids, batch.valid, _tokens_of(batch, batch.loss_mask)
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


def _tokens_of(batch: PackedBatch, counted: NDArray[np.bool_]) -> NDArray[np.float64]:
    """[R] how many of the [T] tokens each rollout has that count."""
    return np.bincount(batch.rollout_ids[batch.sequence_ids], weights=counted, minlength=len(batch.rewards))
