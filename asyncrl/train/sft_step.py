"""One step of supervised training: cross-entropy of an optimizer batch, with the forward and the optimizer of reinforcement learning."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncrl.train.examples import PackedExamples
from asyncrl.train.minibatch import alone
from asyncrl.train.trainee import Trainee


def supervised_step(trainee: Trainee, batch: PackedExamples, *, version: int) -> dict[str, Any]:
    """One update on the mean, over all learned tokens of the batch, of −logprob; every rank calls it with the same batch.

    The denominator is that of the whole batch, so neither micro-batches nor ranks change the gradient.
    """
    count = batch.num_loss_tokens
    total = torch.zeros((), dtype=torch.float64, device=trainee.ranks.device)

    def objective(logprobs: Tensor, entropy: Tensor, chosen: slice) -> Tensor:
        return -logprobs.sum() * (trainee.ranks.world_size / count)  # FSDP2 averages over the ranks

    trainee.policy.zero_grad()  # what a step that failed half-way may have left
    for inputs in alone(trainee, batch.tokens, cu_seqlens=batch.cu_seqlens, targets=batch.loss_mask,
                        temperatures=np.ones(len(batch.cu_seqlens) - 1, np.float32)):
        logprobs, _, value = trainee.policy(inputs, objective)
        value.backward()
        total -= logprobs.double().sum()
    update = trainee.optimizer.update(version=version)
    return {"loss": float(trainee.ranks.sum(total)) / count, "tokens": count, "grad_norm": update.grad_norm,
            "skipped": update.skipped or "", "learning_rate": trainee.config.trainer.learning_rate_at(version)}
