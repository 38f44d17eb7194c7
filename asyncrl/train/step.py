"""One step: from a batch to at least one update of the weights.

    score(): logprobs under proximal and reference weights, values [T] ──▶ advantages, returns [T] ──▶ updates of the critic
        ──▶ correct(), once, frozen ──▶ per minibatch: per micro-batch: loss, backward ──▶ one update of the policy

`passes` says what is scored and `TrainConfig` where that is left out. Every rank maps the whole batch, so denominators and advantages
need no communication; the [T] numbers that do are summed once, each token being computed by one rank.
"""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from asyncrl.correction.aggregate import aggregate, count
from asyncrl.correction.batch import Corrected, CorrectionBatch
from asyncrl.correction.diagnostics import diagnose_update
from asyncrl.correction.weights import correct
from asyncrl.errors import ShapeError
from asyncrl.metrics import Metrics
from asyncrl.train.advantages import Earned, earn, is_warm_up, shaping_metrics
from asyncrl.train.batch import PackedBatch
from asyncrl.train.config import TrainConfig
from asyncrl.train.critic_update import Learnt, Targets, train_critic
from asyncrl.train.minibatch import Minibatch, minibatches_of, packing_metrics
from asyncrl.train.optim import Update
from asyncrl.train.passes import Scores, score
from asyncrl.train.phases import Phases
from asyncrl.train.policy_update import ROWS, Frozen, Shares, at_update, backward, found_in
from asyncrl.train.record_metrics import record_metrics
from asyncrl.train.reference import Pull, penalties, reference_metrics
from asyncrl.train.trainee import Trainee
from asyncrl.train.work import work_metrics


@dataclass(frozen=True, slots=True, eq=False)
class StepOutcome:
    """What a step did; the same on every rank."""

    metrics: Metrics
    skipped: bool
    """No update was applied, of the policy or, while it warms up alone, of its critic."""
    nonfinite: bool
    """A gradient or logprob was NaN or infinite; the updates it belonged to were not applied."""
    trained_tokens: int
    """Loss tokens that reached an applied update with a weight."""
    tokens: CorrectionBatch | None = None
    """The batch with true proximal logprobs; None where there were none, or not finite ones."""


@dataclass(slots=True, eq=False)
class Traces:
    """[T] numbers of the tokens this rank computed, 0 elsewhere; summed over ranks they are whole. Later epochs overwrite."""

    logprobs: Tensor
    entropy: Tensor
    losses: Tensor
    pull: Tensor
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
    tokens = _tokens(batch, device=trainee.ranks.device)
    tokens.check()
    minibatches = minibatches_of(trainee, batch)
    phases = Phases(trainee.ranks.device)
    with phases.of("forward"):
        scores = score(trainee, minibatches)
    if not scores.is_finite:
        return StepOutcome(metrics=Metrics(), skipped=True, nonfinite=True, trained_tokens=0)
    lost = penalties(trainee.config.reference, proximal_logprobs=scores.proximal_logprobs, ref_logprobs=scores.ref_logprobs,
                     loss_mask=batch.loss_mask)
    values = None if scores.values is None else scores.values.cpu().numpy()
    earned = earn(trainee.config.advantages, batch, values=values, penalties=lost)
    with phases.of("critic"):
        learnt = _train_critic(trainee, minibatches, scores=scores, earned=earned, tokens=tokens)
    if is_warm_up(trainee.config.advantages, version=batch.version):
        outcome = StepOutcome(metrics=Metrics(), skipped=learnt.applied == 0, nonfinite=False, trained_tokens=0)
    else:
        tokens = dataclasses.replace(tokens, advantages=torch.from_numpy(earned.advantages).to(trainee.ranks.device))
        frozen = _freeze(trainee.config, batch, tokens=tokens, scores=scores)
        outcome = _train_policy(trainee, minibatches, frozen=frozen, scores=scores, phases=phases)
    metrics = outcome.metrics
    for more in (learnt.metrics, shaping_metrics(trainee.config.advantages, batch, penalties=lost), packing_metrics(minibatches),
                 record_metrics(trainee, batch), phases.metrics(), work_metrics(trainee, minibatches)):
        metrics.merge(more)
    metrics.last("train/learning_rate/last", trainee.config.trainer.learning_rate_at(batch.version))
    metrics.last("train/step_s/last", time.perf_counter() - began_s)
    return dataclasses.replace(outcome, nonfinite=outcome.nonfinite or learnt.nonfinite)


def _train_critic(trainee: Trainee, minibatches: tuple[Minibatch, ...], *, scores: Scores, earned: Earned,
                  tokens: CorrectionBatch) -> Learnt:
    """The critic's updates, none without one. The policy's do not wait for them: advantages are of the values before."""
    if trainee.critic is None or scores.values is None or earned.returns is None:
        return Learnt(Metrics(), applied=0, nonfinite=False)
    targets = Targets(scores.values, torch.from_numpy(earned.returns).to(trainee.ranks.device), tokens.loss_mask)
    return train_critic(trainee.critic, minibatches, targets=targets, ranks=trainee.ranks, version=tokens.version)


def _train_policy(trainee: Trainee, minibatches: tuple[Minibatch, ...], *, frozen: Frozen, scores: Scores,
                  phases: Phases) -> StepOutcome:
    if frozen.corrected is not None:
        minibatches = tuple(minibatch.counting(frozen.corrected, tokens=frozen.tokens) for minibatch in minibatches)
    traces = _updates(trainee, minibatches, frozen=frozen, phases=phases)
    applied = [update for update in traces.updates if update.skipped is None]
    nonfinite = any(update.skipped == "nonfinite" for update in traces.updates)
    metrics = Metrics()
    if not nonfinite:
        frozen = _completed(frozen, traces, config=trainee.config)
        _record(metrics, traces, frozen=frozen, config=trainee.config)
    if not nonfinite and scores.ref_logprobs is not None:
        metrics.merge(_distance(traces, scores, loss_mask=frozen.tokens.loss_mask))
    metrics.sum("train/updates/sum", len(applied))
    metrics.sum("train/updates_zero/sum", sum(update.skipped == "zero" for update in traces.updates))
    metrics.merge(trainee.rate_scale.metrics())
    return StepOutcome(metrics=metrics, skipped=not applied, nonfinite=nonfinite,
                       trained_tokens=_trained_tokens(minibatches, traces.updates, corrected=frozen.corrected),
                       tokens=frozen.tokens if _has_proximal(trainee.config) and not nonfinite else None)


def _require_whole_rollouts(batch: PackedBatch, *, aggregation: str) -> None:
    """A rollout weighs 1; a mean over sequences would count each of its sequences."""
    rollouts, sequences = np.unique(batch.rollout_ids, return_counts=True)
    if aggregation not in ("token_mean", "token_sum") and bool((sequences > 1).any()):
        forked = int(np.argmax(sequences > 1))
        raise ShapeError(f"loss.aggregation = {aggregation!r} averages over sequences, and rollout {rollouts[forked]} of the batch has "
                         f"{sequences[forked]}: it would weigh {sequences[forked]} times. Use token_mean or token_sum.")


def _tokens(batch: PackedBatch, *, device: torch.device) -> CorrectionBatch:
    """The batch as tensors; proximal logprobs are still those of the rollout, advantages 0."""

    def put(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    rollout_logprobs = put(batch.rollout_logprobs)
    return CorrectionBatch(
        rollout_logprobs=rollout_logprobs, proximal_logprobs=rollout_logprobs, loss_mask=put(batch.loss_mask),
        advantages=torch.zeros_like(rollout_logprobs), turn_ids=put(batch.turn_ids), policy_versions=put(batch.policy_versions),
        cu_seqlens=put(batch.cu_seqlens), group_ids=put(batch.group_ids[batch.rollout_ids]), version=batch.version)


def _freeze(config: TrainConfig, batch: PackedBatch, *, tokens: CorrectionBatch, scores: Scores) -> Frozen:
    """What every update of the step reads; without proximal logprobs the correction waits for those of the first forward."""
    correction, corrected, found = config.build_correction(), None, {}
    if scores.proximal_logprobs is not None:
        tokens = dataclasses.replace(tokens, proximal_logprobs=scores.proximal_logprobs)
    if scores.proximal_logprobs is not None or correction.proximal == "log_linear":
        corrected = correct(tokens, correction)
        found = found_in(tokens, corrected, settings=config.loss)
    pull = Pull.of(config.reference, ref_logprobs=scores.ref_logprobs, batch=batch, advantages=config.advantages)
    return Frozen(tokens, correction, corrected, found=found, pull=pull)


def _completed(frozen: Frozen, traces: Traces, *, config: TrainConfig) -> Frozen:
    """With the proximal logprobs and the correction that only the forward of the step's one update gave."""
    if config.has_proximal_pass or config.trainer.updates_per_step > 1:
        return frozen
    tokens = dataclasses.replace(frozen.tokens, proximal_logprobs=traces.logprobs)
    corrected = correct(tokens, frozen.correction) if frozen.corrected is None else frozen.corrected
    return dataclasses.replace(frozen, tokens=tokens, corrected=corrected)


def _has_proximal(config: TrainConfig) -> bool:
    """Whether a step computes proximal logprobs at all."""
    return config.has_proximal_pass or config.trainer.updates_per_step == 1


def _updates(trainee: Trainee, minibatches: tuple[Minibatch, ...], *, frozen: Frozen, phases: Phases) -> Traces:
    tokens, settings = frozen.tokens, trainee.config.trainer
    rows = tokens.rollout_logprobs.new_zeros(ROWS, len(tokens.loss_mask))
    updates: list[Update] = []
    trainee.policy.zero_grad()  # what a step that failed half-way may have left
    for _ in range(settings.epochs):
        for minibatch in minibatches:
            applied = sum(update.skipped is None for update in updates)
            then = at_update(applied, corrected=frozen.corrected, tokens=tokens, updates=settings.epochs * len(minibatches))
            now = dataclasses.replace(frozen, corrected=then)
            for inputs in minibatch.microbatches():
                rows[:, inputs.places] = backward(trainee.policy, inputs=inputs, frozen=now, settings=trainee.config.loss,
                                                  over=Shares(minibatch.denominators, trainee.ranks.world_size), phases=phases)
            scale = trainee.rate_scale.of_update(rows[0], inputs=minibatch.inputs, rollout_logprobs=tokens.rollout_logprobs)
            with phases.of("optimizer"):
                updates.append(trainee.optimizer.update(version=tokens.version, scale=scale))
    return Traces(*trainee.ranks.sum(rows), updates=updates)


def _trained_tokens(minibatches: tuple[Minibatch, ...], updates: list[Update], *, corrected: Corrected | None) -> int:
    """Tokens with a weight in at least one update that was applied; updates repeat the minibatches, epoch after epoch."""
    if corrected is None:
        return 0
    reached = torch.zeros_like(corrected.keep_mask)
    for number, update in enumerate(updates):
        if update.skipped is None:
            reached |= minibatches[number % len(minibatches)].loss_mask
    return int((corrected.keep_mask & reached).sum())


def _record(metrics: Metrics, traces: Traces, *, frozen: Frozen, config: TrainConfig) -> None:
    tokens, corrected, clipped = frozen.tokens, frozen.corrected, traces.clipped.bool()
    assert corrected is not None, "what the step trained on was corrected, before it or after"
    metrics.merge(corrected.metrics)
    mask, kept_entropy = tokens.loss_mask, traces.entropy * corrected.keep_mask
    metrics.mean("train/loss/mean", _whole(traces.losses, frozen=frozen, config=config), count=1)
    metrics.mean("train/entropy/mean", float(traces.entropy[mask].double().sum()), count=int(mask.sum()))
    if config.loss.entropy_coefficient:
        metrics.mean("train/entropy_bonus/mean",
                     config.loss.entropy_coefficient * _whole(kept_entropy, frozen=frozen, config=config), count=1)
    if frozen.pull is not None:
        metrics.mean("reference/loss/mean", _whole(traces.pull, frozen=frozen, config=config), count=1)
    if math.isfinite(tau := float(frozen.found.get("tau", math.inf))):
        metrics.last("train/m2po_log_clip/last", tau)
    metrics.last("train/grad_norm/last", traces.updates[-1].grad_norm)
    if corrected.alpha is None:
        metrics.merge(diagnose_update(traces.log_ratio, clipped=clipped, loss_mask=mask, staleness=tokens.version - tokens.policy_versions))
    else:  # how far a guess is away from its own ingredients says nothing
        metrics.mean("correction/clipped/frac", float(clipped[mask].sum()), count=int(mask.sum()))


def _distance(traces: Traces, scores: Scores, *, loss_mask: Tensor) -> Metrics:
    """From the reference, at the start of the step if it was scored there, else at the last forward of each token."""
    assert scores.ref_logprobs is not None
    logprobs = traces.logprobs if scores.proximal_logprobs is None else scores.proximal_logprobs
    return reference_metrics(logprobs, ref_logprobs=scores.ref_logprobs, loss_mask=loss_mask)


def _whole(values: Tensor, *, frozen: Frozen, config: TrainConfig) -> float:
    """[T] numbers of tokens as one, the way the loss makes one of them."""
    tokens, corrected = frozen.tokens, frozen.corrected
    assert corrected is not None
    return float(aggregate(values, loss_mask=corrected.counted, cu_seqlens=tokens.cu_seqlens, mode=config.loss.aggregation,
                           denominators=count(corrected.counted, cu_seqlens=tokens.cu_seqlens), max_tokens=config.loss.max_tokens))
