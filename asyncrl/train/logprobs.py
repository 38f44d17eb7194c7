"""Logprobs and entropy of predicted tokens from hidden states; no [P, V] tensor lives longer than its chunk.

Two ways to the gradient of a chunk of logits:

    the objective is a sum over tokens   its derivative is known as soon as the chunk is: hidden and weight gradients are made in the
                                         forward pass, the chunk is computed once
    it needs whole sequences             the backward pass computes the chunk again

Both, and a pass without gradients, score a chunk by the same operations: equal weights give equal bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from asyncrl.train.kept_rows import KeptRows

CHUNK_LOGITS = 1 << 23
"""Logits of a chunk: 32 MiB in float32, twice that alive, under a soft cap three times; large enough that the matrix products run at full
speed."""

_IMPOSSIBLE = -200.0
"""e to this is 0 in float32; a logit of −inf counts as this one in the entropy, where 0 · −inf would be NaN."""

Objective = Callable[[Tensor, Tensor, slice], Tensor]
"""What a chunk of predictions adds to the quantity that is minimised, a scalar, from its logprobs [n] and entropies [n], both with
gradient, and their place among the P."""


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """The output layer, and how much of its result may be alive."""

    weight: Tensor
    """[V, D]"""
    bias: Tensor | None
    """[V]"""
    chunk_logits: int = CHUNK_LOGITS
    softcap: float | None = None
    """Logits s become softcap · tanh(s / softcap)."""

    @classmethod
    def of(cls, layer: nn.Linear, *, chunk_logits: int = CHUNK_LOGITS, softcap: float | None = None) -> Head:
        """That of a linear layer."""
        return cls(layer.weight, layer.bias, chunk_logits, softcap)

    @property
    def chunk_rows(self) -> int:
        """Predictions of a chunk."""
        return max(1, self.chunk_logits // len(self.weight))


@dataclass(frozen=True, slots=True, eq=False)
class Predictions:
    """What P hidden states are to predict."""

    targets: Tensor
    """[P] int64"""
    temperatures: Tensor
    """[P] float32"""
    kept: KeptRows | None = None
    """The sets they were sampled among: logprobs and entropy are those of the distribution over the set. None: over the vocabulary."""


def token_logprobs(hidden: Tensor, *, head: Head, predictions: Predictions) -> tuple[Tensor, Tensor]:
    """log-softmax(logits / temperature) of each target, and the entropy of its distribution in nats; [P] float32 each, with gradient.

    Args:
        hidden: [P, D] final hidden states, each of the token before its target.
        head: maps [n, D] to [n, V] logits.
        predictions: the targets, and the temperatures they were sampled at.
    """
    return _Scores.apply(hidden, head.weight, head.bias, head, predictions)


def token_objective(hidden: Tensor, *, head: Head, predictions: Predictions, objective: Objective) -> tuple[Tensor, Tensor, Tensor]:
    """The objective of all predictions, a scalar with gradient, and their logprobs [P] and entropy [P], detached.

    The logits are computed once. Call backward at most once: the gradients are handed over, not kept.
    """
    return _Objective.apply(hidden, head.weight, head.bias, head, predictions, objective)


@dataclass(slots=True, eq=False)
class _Chunk:
    """n predictions over the whole vocabulary."""

    rows: slice
    shifted: Tensor
    """[n, V] logits / temperature − their maximum; no less than `_IMPOSSIBLE`, which is what a token outside the kept set has."""
    exp: Tensor
    """[n, V] e^shifted."""
    log_sum: Tensor
    """[n] log Σ exp"""
    logprobs: Tensor
    """[n]"""
    entropy: Tensor
    """[n]"""
    slope: Tensor | None
    """[n, V] of the soft cap."""


def _chunks(hidden: Tensor, head: Head, predictions: Predictions) -> Iterator[_Chunk]:
    """One at a time, if whoever takes them lets each go before the next."""
    for start in range(0, len(hidden), head.chunk_rows):
        yield _chunk(hidden, head, predictions, slice(start, min(start + head.chunk_rows, len(hidden))))


def _chunk(hidden: Tensor, head: Head, predictions: Predictions, rows: slice) -> _Chunk:
    targets, temperatures = predictions.targets[rows], predictions.temperatures[rows]
    logits = linear(hidden[rows], head.weight, head.bias).float()
    slope = None
    if head.softcap is not None:
        logits.div_(head.softcap).tanh_()
        slope = logits.square().neg_().add_(1.0)
        logits.mul_(head.softcap)
    shifted = logits.div_(temperatures[:, None])
    if predictions.kept is not None:
        predictions.kept.mask_(shifted, rows)
    shifted.sub_(shifted.amax(dim=-1, keepdim=True))
    exp = shifted.exp()
    total = exp.sum(dim=-1)
    log_sum = total.log()
    logprobs = shifted.gather(1, targets[:, None])[:, 0] - log_sum
    # by bmm: vecdot would hold all products at once
    mean = torch.bmm(exp[:, None], shifted.clamp_(min=_IMPOSSIBLE)[:, :, None])[:, 0, 0].div_(total)
    return _Chunk(rows, shifted, exp, log_sum, logprobs, log_sum - mean, slope)


def _scores(hidden: Tensor, head: Head, predictions: Predictions) -> tuple[Tensor, Tensor]:
    logprobs, entropy = (torch.empty(len(hidden), device=hidden.device) for _ in range(2))
    for chunk in _chunks(hidden, head, predictions):
        logprobs[chunk.rows], entropy[chunk.rows] = chunk.logprobs, chunk.entropy
        del chunk
    return logprobs, entropy


class _Gradients:
    """Sums of what chunks give; the weight's in float32, whatever dtype computes."""

    def __init__(self, hidden: Tensor, head: Head, *, wanted: tuple[bool, ...]) -> None:
        self._head, self._source = head, hidden
        of_hidden, of_weight, of_bias = wanted[:3]
        self.hidden = torch.empty_like(hidden) if of_hidden else None
        self.weight = torch.zeros_like(head.weight, dtype=torch.float32) if of_weight else None
        self.bias = torch.zeros_like(head.bias, dtype=torch.float32) if of_bias and head.bias is not None else None

    def add(self, chunk: _Chunk, *, predictions: Predictions, by_logprob: Tensor, by_entropy: Tensor | None) -> None:
        """Take the derivative by the logits of a chunk, whose tensors it consumes.

            ∂ logprob / ∂ logits = (onehot − p) / T        ∂ entropy / ∂ logits = −p (log p + entropy) / T
        """
        targets, temperatures = predictions.targets[chunk.rows, None], predictions.temperatures[chunk.rows]
        p_factor = -chunk.log_sum.exp().mul_(temperatures).reciprocal_()
        if by_entropy is None:
            logits = chunk.exp.mul_((by_logprob * p_factor)[:, None])
        else:
            logits = chunk.shifted.add_((chunk.entropy - chunk.log_sum)[:, None]).mul_(by_entropy[:, None]).add_(by_logprob[:, None])
            logits = logits.mul_(chunk.exp).mul_(p_factor[:, None])
        logits.scatter_(1, targets, logits.gather(1, targets) + (by_logprob / temperatures)[:, None])
        if chunk.slope is not None:
            logits.mul_(chunk.slope)
        if self.bias is not None:
            self.bias += logits.sum(dim=0)
        logits = logits.to(self._source.dtype)
        if self.hidden is not None:
            torch.mm(logits, self._head.weight, out=self.hidden[chunk.rows])
        if self.weight is not None:
            source = self._source[chunk.rows]
            if logits.dtype == torch.float32:
                self.weight.addmm_(logits.t(), source)
            else:
                self.weight += logits.t() @ source


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head,
                predictions: Predictions) -> tuple[Tensor, Tensor]:
        context.save_for_backward(hidden, weight, bias)
        context.chunk_logits, context.softcap, context.predictions = head.chunk_logits, head.softcap, predictions
        context.set_materialize_grads(False)
        return _scores(hidden, head, predictions)

    @staticmethod
    def backward(context: Any, by_logprob: Tensor | None, by_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = context.saved_tensors
        by_logprob = torch.zeros(len(hidden), device=hidden.device) if by_logprob is None else by_logprob
        head = Head(weight, bias, context.chunk_logits, context.softcap)
        gradients = _Gradients(hidden, head, wanted=context.needs_input_grad)
        for chunk in _chunks(hidden, head, context.predictions):
            gradients.add(chunk, predictions=context.predictions, by_logprob=by_logprob[chunk.rows],
                          by_entropy=None if by_entropy is None else by_entropy[chunk.rows])
            del chunk
        return gradients.hidden, gradients.weight, gradients.bias, None, None


class _Objective(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head, predictions: Predictions,
                objective: Objective) -> tuple[Tensor, Tensor, Tensor]:
        gradients = _Gradients(hidden, head, wanted=context.needs_input_grad)
        logprobs, entropy = (torch.empty(len(hidden), device=hidden.device) for _ in range(2))
        total = torch.zeros((), device=hidden.device)
        for chunk in _chunks(hidden, head, predictions):
            logprobs[chunk.rows], entropy[chunk.rows] = chunk.logprobs, chunk.entropy
            leaves = chunk.logprobs.detach().requires_grad_(), chunk.entropy.detach().requires_grad_()
            with torch.enable_grad():
                share = objective(*leaves, chunk.rows)
            by_logprob, by_entropy = torch.autograd.grad(share, leaves, allow_unused=True)
            total += share.detach()
            by_logprob = torch.zeros_like(chunk.logprobs) if by_logprob is None else by_logprob
            gradients.add(chunk, predictions=predictions, by_logprob=by_logprob, by_entropy=by_entropy)
            del chunk
        context.gradients = gradients
        context.mark_non_differentiable(logprobs, entropy)
        return total, logprobs, entropy

    @staticmethod
    def backward(context: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradients, context.gradients = context.gradients, None
        handed_over = (None if part is None else part.mul_(upstream) for part in (gradients.hidden, gradients.weight, gradients.bias))
        return *handed_over, None, None, None
