"""One step: from a batch to at least one update of the weights.

    proximal logprobs [T] ──▶ correct(), once, frozen ──▶ per minibatch: per micro-batch: loss, backward ──▶ one update

`TrainConfig.has_proximal_pass` says where the first of these is left out. Every rank maps the whole batch, so denominators and
advantages need no communication; the [T] numbers that do are summed once, each token being computed by one rank.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from asyncrl.correction.aggregate import Denominators, aggregate, count
from asyncrl.correction.batch import Corrected, CorrectionBatch
from asyncrl.correction.diagnostics import diagnose_update
from asyncrl.correction.spec import Correction
from asyncrl.correction.weights import correct
from asyncrl.errors import ShapeError
from asyncrl.metrics import Metrics
from asyncrl.train.advantages import shaping_metrics, token_advantages
from asyncrl.train.batch import PackedBatch
from asyncrl.train.config import TrainConfig
from asyncrl.train.flops import ModelFlops
from asyncrl.train.microbatch import build, layout
from asyncrl.train.model import ForwardInputs, Policy
from asyncrl.train.optim import Optimizer, Update
from asyncrl.train.packing import Packing, plan
from asyncrl.train.parallel import Ranks
from asyncrl.train.policy_update import ROWS, Frozen, at_update, backward


@dataclass(frozen=True, slots=True, eq=False)
class Trainee:
    """What a step works on, on one rank."""

    policy: Policy
    optimizer: Optimizer
    ranks: Ranks
    config: TrainConfig


@dataclass(frozen=True, slots=True, eq=False)
class StepOutcome:
    """What a step did; the same on every rank."""

    metrics: Metrics
    skipped: bool
    """No update was applied."""
    nonfinite: bool
    """A gradient or logprob was NaN or infinite; the updates it belonged to were not applied."""
    trained_tokens: int
    """Loss tokens that reached an applied update with a weight."""
    tokens: CorrectionBatch | None = None
    """The batch with true proximal logprobs; None where there were none, or not finite ones."""


@dataclass(frozen=True, slots=True, eq=False)
class Minibatch:
    """The share of one update: what this rank computes, and the denominators of all ranks."""

    inputs: tuple[ForwardInputs, ...]
    packing: Packing
    loss_mask: Tensor
    """[T] loss tokens of the minibatch, on all ranks."""
    denominators: Denominators


@dataclass(slots=True, eq=False)
class Traces:
    """[T] numbers of the tokens this rank computed, 0 elsewhere; summed over ranks they are whole. Later epochs overwrite."""

    logprobs: Tensor
    entropy: Tensor
    losses: Tensor
    log_ratio: Tensor
    clipped: Tensor
    updates: list[Update] = field(default_factory=list)


def train_step(trainee: Trainee, batch: PackedBatch) -> StepOutcome:
    """Train on a batch; every rank calls it with the same one.

    Raises StalenessError for a token newer than the batch's version, ShapeError for forked rollouts in a loss that counts sequences.
    """
    began_s = time.perf_counter()
    if batch.num_loss_tokens == 0:
        return StepOutcome(metrics=Metrics(), skipped=True, nonfinite=False, trained_tokens=0)
    _require_whole_rollouts(batch, aggregation=trainee.config.loss.aggregation)
    tokens = _tokens(trainee, batch)
    tokens.check()
    correction = trainee.config.build_correction()
    minibatches = minibatches_of(trainee, batch)
    corrected = correct(tokens, correction) if correction.proximal == "log_linear" else None
    if trainee.config.has_proximal_pass:
        tokens = dataclasses.replace(tokens, proximal_logprobs=_proximal(trainee, minibatches, like=tokens.rollout_logprobs))
        if not bool(torch.isfinite(tokens.proximal_logprobs).all()):
            return StepOutcome(metrics=Metrics(), skipped=True, nonfinite=True, trained_tokens=0)
        corrected = correct(tokens, correction)
        minibatches = tuple(_counting(minibatch, corrected, tokens=tokens) for minibatch in minibatches)
    traces = _updates(trainee, minibatches, tokens=tokens, correction=correction, corrected=corrected)
    applied = [update for update in traces.updates if update.skipped is None]
    nonfinite = any(update.skipped == "nonfinite" for update in traces.updates)
    has_proximal = trainee.config.has_proximal_pass
    if not has_proximal and trainee.config.trainer.updates_per_step == 1:
        tokens, has_proximal = dataclasses.replace(tokens, proximal_logprobs=traces.logprobs), True
    if not nonfinite and corrected is None:
        corrected = correct(tokens, correction)
    metrics = Metrics()
    if not nonfinite:
        metrics.merge(corrected.metrics)
        metrics.merge(shaping_metrics(trainee.config.advantages, batch))
        _record(metrics, traces, tokens=tokens, corrected=corrected, config=trainee.config)
    metrics.mean("train/packing_waste/mean", sum(minibatch.packing.waste for minibatch in minibatches), count=len(minibatches))
    metrics.mean("train/rank_imbalance/mean", sum(minibatch.packing.imbalance for minibatch in minibatches), count=len(minibatches))
    metrics.sum("train/updates/sum", len(applied))
    metrics.sum("train/updates_zero/sum", sum(update.skipped == "zero" for update in traces.updates))
    metrics.last("train/learning_rate/last", trainee.config.trainer.learning_rate_at(batch.version))
    metrics.last("train/step_s/last", time.perf_counter() - began_s)
    return StepOutcome(metrics=metrics, skipped=not applied, nonfinite=nonfinite,
                       trained_tokens=_trained_tokens(minibatches, traces.updates, corrected=corrected),
                       tokens=tokens if has_proximal and not nonfinite else None)


def _require_whole_rollouts(batch: PackedBatch, *, aggregation: str) -> None:
    """A rollout weighs 1; a mean over sequences would count each of its sequences."""
    rollouts, sequences = np.unique(batch.rollout_ids, return_counts=True)
    if aggregation not in ("token_mean", "token_sum") and bool((sequences > 1).any()):
        forked = int(np.argmax(sequences > 1))
        raise ShapeError(f"loss.aggregation = {aggregation!r} averages over sequences, and rollout {rollouts[forked]} of the batch has "
                         f"{sequences[forked]}: it would weigh {sequences[forked]} times. Use token_mean or token_sum.")


def minibatches_of(trainee: Trainee, batch: PackedBatch) -> tuple[Minibatch, ...]:
    """Whole groups for each update, spread over ranks and micro-batches; the same plan on every rank."""
    settings, ranks = trainee.config.trainer, trainee.ranks
    group_ids = batch.group_ids[batch.rollout_ids]
    whole = layout(batch.tokens, cu_seqlens=batch.cu_seqlens, targets=batch.loss_mask, temperatures=batch.temperatures,
                   group_ids=group_ids, records=batch.records)
    groups = np.unique(group_ids[whole.costs > 0])
    flops = ModelFlops.of(trainee.policy.lm.config, parameters=sum(parameter.numel() for parameter in trainee.policy.lm.parameters()))
    minibatches = []
    for chosen in np.array_split(groups, min(settings.minibatches_per_step, len(groups))):
        inside = np.isin(group_ids, chosen)
        packing = plan(np.where(inside, whole.costs, 0), shared=whole.shared, group_ids=group_ids, ranks=ranks.world_size,
                       microbatch_tokens=settings.microbatch_tokens, pair_cost=flops.pair_cost)
        mask = torch.from_numpy(batch.loss_mask & np.repeat(inside, np.diff(batch.cu_seqlens)))
        minibatches.append(Minibatch(
            inputs=tuple(ForwardInputs.of(build(whole, sequences), ranks.device) for sequences in packing.ranks[ranks.rank]),
            packing=packing, loss_mask=mask.to(ranks.device), denominators=count(mask, cu_seqlens=torch.from_numpy(batch.cu_seqlens))))
    return tuple(minibatches)


def _tokens(trainee: Trainee, batch: PackedBatch) -> CorrectionBatch:
    """The batch as tensors, with the advantage of every token; proximal logprobs are still those of the rollout."""

    def put(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(trainee.ranks.device)

    rollout_logprobs = put(batch.rollout_logprobs)
    return CorrectionBatch(
        rollout_logprobs=rollout_logprobs, proximal_logprobs=rollout_logprobs, loss_mask=put(batch.loss_mask),
        advantages=put(token_advantages(trainee.config.advantages, batch)),
        turn_ids=put(batch.turn_ids), policy_versions=put(batch.policy_versions), cu_seqlens=put(batch.cu_seqlens),
        group_ids=put(batch.group_ids[batch.rollout_ids]), version=batch.version)


@torch.no_grad()
def _proximal(trainee: Trainee, minibatches: tuple[Minibatch, ...], *, like: Tensor) -> Tensor:
    """[T] logprobs under the weights at the start of the step, by the micro-batches that will train."""
    proximal = torch.zeros_like(like)
    for minibatch in minibatches:
        for inputs in minibatch.inputs:
            proximal[inputs.places] = trainee.policy(inputs)[0]
    return trainee.ranks.sum(proximal)


def _updates(trainee: Trainee, minibatches: tuple[Minibatch, ...], *, tokens: CorrectionBatch, correction: Correction,
             corrected: Corrected | None) -> Traces:
    rows = tokens.rollout_logprobs.new_zeros(ROWS, len(tokens.loss_mask))
    updates: list[Update] = []
    trainee.policy.zero_grad()  # what a step that failed half-way may have left
    for _ in range(trainee.config.trainer.epochs):
        for minibatch in minibatches:
            applied = sum(update.skipped is None for update in updates)
            then = at_update(applied, corrected=corrected, tokens=tokens, updates=trainee.config.trainer.epochs * len(minibatches))
            frozen = Frozen(tokens, correction, then, minibatch.denominators)
            for inputs in minibatch.inputs:
                rows[:, inputs.places] = backward(trainee.policy, inputs=inputs, frozen=frozen, settings=trainee.config.loss,
                                                  world_size=trainee.ranks.world_size)
            updates.append(trainee.optimizer.update(version=tokens.version))
    return Traces(*trainee.ranks.sum(rows), updates=updates)


def _counting(minibatch: Minibatch, corrected: Corrected, *, tokens: CorrectionBatch) -> Minibatch:
    """With the denominators that the correction leaves."""
    counted = minibatch.loss_mask & corrected.counted
    return dataclasses.replace(minibatch, denominators=count(counted, cu_seqlens=tokens.cu_seqlens))


def _trained_tokens(minibatches: tuple[Minibatch, ...], updates: list[Update], *, corrected: Corrected | None) -> int:
    """Tokens with a weight in at least one update that was applied; updates repeat the minibatches, epoch after epoch."""
    if corrected is None:
        return 0
    reached = torch.zeros_like(corrected.keep_mask)
    for number, update in enumerate(updates):
        if update.skipped is None:
            reached |= minibatches[number % len(minibatches)].loss_mask
    return int((corrected.keep_mask & reached).sum())


def _record(metrics: Metrics, traces: Traces, *, tokens: CorrectionBatch, corrected: Corrected, config: TrainConfig) -> None:
    mask, counted, clipped = tokens.loss_mask, corrected.counted, traces.clipped.bool()
    loss = aggregate(traces.losses, loss_mask=counted, cu_seqlens=tokens.cu_seqlens, mode=config.loss.aggregation,
                     denominators=count(counted, cu_seqlens=tokens.cu_seqlens), max_tokens=config.loss.max_tokens)
    metrics.mean("train/loss/mean", float(loss), count=1)
    metrics.mean("train/entropy/mean", float(traces.entropy[mask].double().sum()), count=int(mask.sum()))
    metrics.last("train/grad_norm/last", traces.updates[-1].grad_norm)
    if corrected.alpha is None:
        metrics.merge(diagnose_update(traces.log_ratio, clipped=clipped, loss_mask=mask, staleness=tokens.version - tokens.policy_versions))
    else:  # how far a guess is away from its own ingredients says nothing
        metrics.mean("correction/clipped/frac", float(clipped[mask].sum()), count=int(mask.sum()))
