"""The same step written plainly, in float64: transformers' own forward, one sequence at a time, nothing packed, nothing shared."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from asyncrl.types import Batch, Rollout, Sequence

CLIP_LOW, CLIP_HIGH, MAX_TOKENS = 0.2, 0.28, 7
GEOMETRIC = (0.2, 0.8)
"""Mean ratios outside it lose their sequence; the made-up rollouts are likelier than the models find them, so this cuts both ends."""
LEARNING_RATE, EPS = 1e-2, 0.1
"""Of AdamW; with so large an eps its update follows the gradient smoothly, and rounding stays rounding."""


@dataclass(frozen=True)
class PlainStep:
    """Settings under the names of the configuration."""

    advantages: str
    correction: str
    loss: str
    aggregation: str
    minibatches_per_step: int
    epochs: int
    max_grad_norm: float


@dataclass(frozen=True)
class PlainResult:
    """What the step did."""

    gradients: list[dict[str, Tensor]]
    """Of each update, before clipping."""
    weights: dict[str, Tensor]
    losses: list[float]

    @property
    def grad_norms(self) -> list[float]:
        return [float(torch.cat([gradient.flatten() for gradient in update.values()]).norm()) for update in self.gradients]


@dataclass
class Row:
    """One sequence with the advantage of its rollout."""

    sequence: Sequence
    temperature: float
    advantage: float
    proximal: Tensor | None = None


def plain_step(folder: Path, batch: Batch, how: PlainStep) -> PlainResult:
    """Trains a fresh float64 model of `folder`; an update without any gradient is left out."""
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager",
                                              experts_implementation="eager").eval()
    optimizer = torch.optim.AdamW(lm.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), eps=EPS, weight_decay=0.0)
    groups = [rows for group in batch.groups if (rows := _rows(group.rollouts, how.advantages))]
    for rows in groups:
        for row in rows:
            row.proximal = _logprobs(lm, row).detach()
    result = PlainResult(gradients=[], weights=dict(lm.named_parameters()), losses=[])
    shares, applied = _minibatches(groups, how.minibatches_per_step) * how.epochs, 0
    for rows in shares:
        optimizer.zero_grad()
        loss = _loss(lm, rows, how, clock=(batch.version, batch.version + applied / len(shares)))
        loss.backward()
        result.losses.append(float(loss.detach()))
        result.gradients.append({name: parameter.grad.clone() for name, parameter in lm.named_parameters()})
        if float(torch.nn.utils.clip_grad_norm_(lm.parameters(), how.max_grad_norm)) > 0.0:
            optimizer.step()
            applied += 1
    return result


def _minibatches(groups: list[list[Row]], count: int) -> list[list[Row]]:
    """Groups in order, the first minibatches one larger where they do not divide."""
    count = min(count, len(groups))
    size, extra = divmod(len(groups), count)
    ends = [number * size + min(number, extra) for number in range(count + 1)]
    return [[row for rows in groups[start:end] for row in rows] for start, end in itertools.pairwise(ends)]


def _logprobs(lm: PreTrainedModel, row: Row) -> Tensor:
    """Of the loss tokens of one sequence."""
    tokens = torch.from_numpy(row.sequence.tokens).long()
    logits = lm(input_ids=tokens[None], use_cache=False).logits[0].double() / row.temperature
    return torch.stack([torch.log_softmax(logits[t - 1], dim=-1)[tokens[t]] for t in row.sequence.loss_mask.nonzero()[0].tolist()])


def _loss(lm: PreTrainedModel, rows: list[Row], how: PlainStep, *, clock: tuple[float, float]) -> Tensor:
    losses = [_token_losses(_logprobs(lm, row), row, how, clock=clock) for row in rows]
    total, kept = torch.cat(losses).sum(), [own for own, row in zip(losses, rows, strict=True) if _counts(row, how)]
    sequences, tokens = max(len(kept), 1), max(sum(map(len, kept)), 1)
    return {"token_mean": total / tokens, "token_sum": total, "seq_mean_token_sum": total / sequences,
            "seq_mean_token_mean": torch.stack([own.mean() for own in losses]).sum() / sequences,
            "dr_grpo": total / (sequences * MAX_TOKENS)}[how.aggregation]


def _counts(row: Row, how: PlainStep) -> bool:
    """Whether a sequence is in the denominators."""
    return how.correction != "geometric_kept" or GEOMETRIC[0] <= float(_mean_ratio(row)) <= GEOMETRIC[1]


def _mean_ratio(row: Row) -> Tensor:
    return (row.proximal - _rollout_logprobs(row)).mean().exp()


def _rollout_logprobs(row: Row) -> Tensor:
    return torch.from_numpy(row.sequence.rollout_logprobs[row.sequence.loss_mask]).double()


def _token_losses(logprobs: Tensor, row: Row, how: PlainStep, *, clock: tuple[float, float]) -> Tensor:
    rollout, proximal = _rollout_logprobs(row), row.proximal
    assert proximal is not None
    start, now = clock
    if how.correction == "log_linear" and now > start:
        versions = torch.from_numpy(row.sequence.policy_versions[row.sequence.loss_mask]).double()
        proximal = rollout + (start - versions) / (now - versions) * (logprobs.detach() - rollout)
    raw = (proximal - rollout).exp()
    weight = {"token_tis": raw.clamp(max=2.0), "log_linear": raw.clamp(max=2.0), "icepop": raw * ((raw >= 0.5) & (raw <= 5.0)),
              "geometric_kept": _mean_ratio(row).clamp(max=0.6) * _counts(row, how) * torch.ones_like(raw),
              "none": torch.ones_like(raw)}[how.correction]
    if how.loss == "reinforce":
        return -weight * row.advantage * logprobs
    log_ratio = logprobs - (rollout if how.loss == "ppo" else proximal)
    if how.loss == "gspo":  # over the tokens that are kept
        log_ratio = (log_ratio * (weight > 0)).sum() / max(int((weight > 0).sum()), 1) * torch.ones_like(raw)
    ratio = log_ratio.exp()
    return -weight * torch.minimum(row.advantage * ratio, row.advantage * ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH))


def _rows(rollouts: tuple[Rollout, ...], advantages: str) -> list[Row]:
    good = [rollout for rollout in rollouts if not rollout.status.is_error]
    rewards = torch.tensor([sum(rollout.rewards.values()) for rollout in good], dtype=torch.float64)
    return [Row(sequence, rollout.sampling.temperature, _advantage(rewards, place, advantages))
            for place, rollout in enumerate(good) for sequence in rollout.sequences if sequence.loss_mask.any()]


def _advantage(rewards: Tensor, place: int, kind: str) -> float:
    others = torch.cat([rewards[:place], rewards[place + 1:]])
    if not len(others) or float(rewards.max() - rewards.min()) == 0.0:
        return 0.0
    centred = float(rewards[place] - rewards.mean())
    return {"grpo": centred / (float(rewards.std()) + 1e-6), "dr_grpo": centred, "rloo": float(rewards[place] - others.mean())}[kind]
