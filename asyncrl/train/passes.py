"""What a step scores before its first update, without a gradient: by the micro-batches that will train, so that equal weights give
equal bits. A token is computed by one rank; the [T] numbers are summed over ranks, which leaves each as it was computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.train.minibatch import Minibatch
from asyncrl.train.model import ForwardInputs
from asyncrl.train.parallel import release
from asyncrl.train.trainee import Trainee


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """[T] float32 numbers of the loss tokens, 0 elsewhere; None where the step does without."""

    proximal_logprobs: Tensor | None
    """Under the weights at the start of the step."""
    ref_logprobs: Tensor | None
    """Under those of the initial model."""
    values: Tensor | None
    """Of the critic, before the step: what it expects of the tokens from here on."""

    @property
    def is_finite(self) -> bool:
        """Whether no number is NaN or infinite: a step on such ones would train on nonsense."""
        scores = (self.proximal_logprobs, self.ref_logprobs, self.values)
        return all(bool(torch.isfinite(each).all()) for each in scores if each is not None)


def score(trainee: Trainee, minibatches: Sequence[Minibatch]) -> Scores:
    """All that this configuration needs; the same on every rank."""
    return Scores(proximal_logprobs=proximal_logprobs(trainee, minibatches) if trainee.config.has_proximal_pass else None,
                  ref_logprobs=reference_logprobs(trainee, minibatches), values=critic_values(trainee, minibatches))


def proximal_logprobs(trainee: Trainee, minibatches: Sequence[Minibatch]) -> Tensor:
    """[T] under the weights as they are."""
    return _of_every_token(trainee, minibatches, lambda inputs: trainee.policy(inputs)[0])


def reference_logprobs(trainee: Trainee, minibatches: Sequence[Minibatch]) -> Tensor | None:
    """[T] under the initial weights; None without a reference."""
    reference = trainee.reference
    if reference is None:
        return None
    with reference.untrained(reference.policy):
        logprobs = _of_every_token(trainee, minibatches, lambda inputs: reference.policy(inputs)[0])
    release(reference.policy)
    return logprobs


def critic_values(trainee: Trainee, minibatches: Sequence[Minibatch]) -> Tensor | None:
    """[T] of the critic; None without one."""
    if trainee.critic is None:
        return None
    values = _of_every_token(trainee, minibatches, trainee.critic.model)
    release(trainee.critic.model)
    return values


@torch.no_grad()
def _of_every_token(trainee: Trainee, minibatches: Sequence[Minibatch], forward: Callable[[ForwardInputs], Tensor]) -> Tensor:
    scores = torch.zeros(len(minibatches[0].loss_mask), device=trainee.ranks.device)
    for minibatch in minibatches:
        for inputs in minibatch.microbatches():
            scores[inputs.places] = forward(inputs)
    return trainee.ranks.sum(scores)
