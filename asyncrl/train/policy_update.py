"""The gradient of one micro-batch: its current logprobs against what the correction froze.

Where the proximal logprobs come from decides what is frozen:

    computed by a pass before the step   weights and masks of the whole batch, `Corrected`
    those of this very forward           nothing: a token-local correction weighs the micro-batch by its own, detached
    guessed between the two, log-linear  how far between, `Corrected.alpha`; another at every update
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from asyncrl.correction import catalog, losses, sequence_losses
from asyncrl.correction.aggregate import Denominators, aggregate
from asyncrl.correction.batch import Corrected, CorrectionBatch
from asyncrl.correction.policy_loss import LossInputs, PolicyLoss
from asyncrl.correction.proximal import log_linear, log_linear_alpha
from asyncrl.correction.ratios import masked_log_ratio
from asyncrl.correction.second_moment import second_moment_tau
from asyncrl.correction.spec import Correction
from asyncrl.correction.weights import weigh
from asyncrl.train.loss_config import GEPO, M2PO, LossConfig
from asyncrl.train.model import ForwardInputs, Policy
from asyncrl.train.phases import Phases
from asyncrl.train.reference import Pull

ROWS = 6
"""Numbers a token leaves behind: logprob, entropy, loss, what of it pulls to the reference, log-ratio, whether it was clipped."""


@dataclass(frozen=True, slots=True, eq=False)
class Frozen:
    """What the losses of one update read beside the current logprobs."""

    tokens: CorrectionBatch
    correction: Correction
    corrected: Corrected | None
    """None: the proximal logprobs are those of the forward that trains."""
    found: Mapping[str, float | Tensor] = field(default_factory=dict)
    """Of `found_in`."""
    pull: Pull | None = None


@dataclass(frozen=True, slots=True)
class Shares:
    """What one micro-batch is a share of."""

    denominators: Denominators
    """Of the update, over all ranks."""
    world_size: int
    """FSDP2 averages gradients over so many ranks; the denominators already are those of all ranks."""


def found_in(tokens: CorrectionBatch, corrected: Corrected, *, settings: LossConfig) -> dict[str, float | Tensor]:
    """Arguments of the loss that are found once, on the whole batch, whatever its split: numbers, or [T] of each token."""
    match settings:
        case M2PO():
            log_ratio = masked_log_ratio(tokens.proximal_logprobs, sampled_logprobs=tokens.rollout_logprobs, mask=corrected.keep_mask)
            return {"tau": float(second_moment_tau(log_ratio, advantages=tokens.advantages, mask=corrected.keep_mask,
                                                   limit=settings.limit, exact=settings.exact))}
        case GEPO():
            return {"group_expectation": catalog.log_group_expectation(
                tokens.rollout_logprobs, mask=corrected.keep_mask, cu_seqlens=tokens.cu_seqlens, group_ids=tokens.group_ids)}
    return {}


def at_update(applied: int, *, corrected: Corrected | None, tokens: CorrectionBatch, updates: int) -> Corrected | None:
    """What an update has of the correction, after so many applied ones of its step. Log-linear proximal logprobs need no guess in the
    first: the weights are still those the step starts from, so their logprobs are the proximal ones."""
    if corrected is None or corrected.alpha is None:
        return corrected
    if applied == 0:
        return None
    alpha = log_linear_alpha(tokens.policy_versions, proximal_version=tokens.version, current_version=tokens.version + applied / updates)
    return dataclasses.replace(corrected, alpha=alpha)


def backward(policy: Policy, *, inputs: ForwardInputs, frozen: Frozen, settings: LossConfig, over: Shares,
             phases: Phases) -> Tensor:
    """Add the gradient of a micro-batch of P predictions; [ROWS, P] of what they were, detached.

    Args:
        policy: forward and backward run through it.
        inputs: of the micro-batch.
        frozen: of the whole batch.
        settings: which loss, its arguments, how it is aggregated.
        over: of the update.
        phases: told of forward and backward; where the loss is token-local the forward has the output layer's gradient in it.
    """
    rows = torch.zeros(ROWS, len(inputs.places), device=inputs.places.device)
    factors = _factors(inputs, frozen=frozen, settings=settings, denominators=over.denominators) * over.world_size

    def objective(logprobs: Tensor, entropy: Tensor, chosen: slice, *, cu_targets: Tensor | None = None) -> Tensor:
        share = _loss_inputs(logprobs.detach(), places=inputs.places[chosen], cu_targets=cu_targets, frozen=frozen)
        found = {name: value[inputs.places[chosen]] if isinstance(value, Tensor) else value for name, value in frozen.found.items()}
        loss = _FUNCTIONS[settings.kind](logprobs, inputs=share, **settings.arguments, **found)
        total, pull = loss.losses, torch.zeros_like(entropy)
        if settings.entropy_coefficient:
            total = total + losses.entropy_bonus(entropy, keep_mask=share.keep_mask, coefficient=settings.entropy_coefficient)
        if frozen.pull is not None:
            pull = frozen.pull.losses(logprobs, inputs=share, places=inputs.places[chosen])
            total = total + pull
        rows[:, chosen] = torch.stack([logprobs.detach(), entropy.detach(), total.detach(), pull.detach(), loss.log_ratio,
                                       loss.clipped.to(entropy.dtype)])
        # The clamp of the ratio has gradient 0 at a logprob that is not finite: it must reach the guard all the same.
        fit = torch.where(torch.isfinite(logprobs.detach()).all(), 1.0, torch.nan)
        return (total * factors[chosen]).sum() * fit

    if settings.is_token_local:
        with phases.of("forward"):
            total = policy(inputs, objective)[2]
    else:
        with phases.of("forward"):
            logprobs, entropy, _ = policy(inputs)
            total = objective(logprobs, entropy, slice(None), cu_targets=inputs.cu_targets)
    with phases.of("backward"):
        total.backward()
    return rows


def _factors(inputs: ForwardInputs, *, frozen: Frozen, settings: LossConfig, denominators: Denominators) -> Tensor:
    """[P] what each token's loss is multiplied by in the sum over ranks and micro-batches."""
    places = inputs.places
    counted = torch.ones_like(places, dtype=torch.bool) if frozen.corrected is None else frozen.corrected.counted[places]
    with torch.enable_grad():
        losses = torch.zeros(len(places), device=places.device, requires_grad=True)
        total = aggregate(losses, loss_mask=counted, cu_seqlens=inputs.cu_targets, denominators=denominators,
                          mode=settings.aggregation, max_tokens=settings.max_tokens)
        return torch.autograd.grad(total, losses)[0]


_FUNCTIONS: dict[str, Callable[..., PolicyLoss]] = {
    "decoupled_ppo": losses.decoupled_ppo, "ppo": losses.ppo, "reinforce": losses.reinforce,
    "importance_sampling": losses.importance_sampling, "gspo": sequence_losses.gspo, "gspo_token": sequence_losses.gspo_token,
    "gmpo": sequence_losses.gmpo, "cispo": catalog.cispo, "cispo_absolute": catalog.cispo_absolute, "sapo": catalog.sapo,
    "aspo": catalog.aspo, "dppo_tv": catalog.dppo_tv, "dppo_kl": catalog.dppo_kl, "prime_rl_dppo": catalog.prime_rl_dppo,
    "prime_rl_ipo": catalog.prime_rl_ipo, "m2po": catalog.m2po, "gepo": catalog.gepo, "vespo": catalog.vespo, "dro": catalog.dro}
"""By `loss.kind`; a section's own settings are the arguments, beside those of `found_in`."""


def _loss_inputs(logprobs: Tensor, *, places: Tensor, cu_targets: Tensor | None, frozen: Frozen) -> LossInputs:
    """Those of the tokens at `places`, whose current logprobs are detached; without offsets they pass for one sequence."""
    tokens, correction, corrected = frozen.tokens, frozen.correction, frozen.corrected
    if cu_targets is None:
        cu_targets = torch.tensor([0, len(places)], device=places.device)
    rollout_logprobs, everywhere = tokens.rollout_logprobs[places], torch.ones_like(places, dtype=torch.bool)
    if corrected is None:
        batch = CorrectionBatch(
            rollout_logprobs=rollout_logprobs, proximal_logprobs=logprobs, advantages=tokens.advantages[places], loss_mask=everywhere,
            turn_ids=tokens.turn_ids[places], policy_versions=tokens.policy_versions[places], cu_seqlens=cu_targets,
            group_ids=torch.zeros_like(cu_targets[1:]), version=tokens.version)
        return LossInputs.of(batch, weigh(batch, dataclasses.replace(correction, proximal="recompute")))
    proximal_logprobs, weights = tokens.proximal_logprobs[places], corrected.weights[places]
    if corrected.alpha is not None:
        guess = log_linear(logprobs, rollout_logprobs=rollout_logprobs, alpha=corrected.alpha[places], loss_mask=everywhere,
                           correction=correction)
        proximal_logprobs, weights = guess.logprobs, guess.weights
    return LossInputs(rollout_logprobs=rollout_logprobs, proximal_logprobs=proximal_logprobs, advantages=tokens.advantages[places],
                      weights=weights, keep_mask=corrected.keep_mask[places], counted=corrected.counted[places],
                      cu_seqlens=cu_targets)
