"""The shares of a batch that a step's updates take: whole groups, spread over ranks and micro-batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.correction.aggregate import Denominators, count
from asyncrl.correction.batch import Corrected, CorrectionBatch
from asyncrl.metrics import Metrics
from asyncrl.records import NOTHING, TokenRecords
from asyncrl.train.batch import PackedBatch
from asyncrl.train.microbatch import build, layout
from asyncrl.train.model import ForwardInputs
from asyncrl.train.packing import Packing, plan
from asyncrl.train.trainee import Trainee


@dataclass(frozen=True, slots=True, eq=False)
class Minibatch:
    """The share of one update: what this rank computes, and the denominators of all ranks."""

    inputs: tuple[ForwardInputs, ...]
    packing: Packing
    loss_mask: Tensor
    """[T] loss tokens of the minibatch, on all ranks."""
    denominators: Denominators

    def microbatches(self) -> Iterator[ForwardInputs]:
        """Its inputs one by one; what attention made for one, and its gradient needs, is dropped before the next."""
        for inputs in self.inputs:
            try:
                yield inputs
            finally:
                inputs.segments.forget()

    def counting(self, corrected: Corrected, *, tokens: CorrectionBatch) -> Minibatch:
        """With the denominators that the correction leaves."""
        counted = self.loss_mask & corrected.counted
        return dataclasses.replace(self, denominators=count(counted, cu_seqlens=tokens.cu_seqlens))


def minibatches_of(trainee: Trainee, batch: PackedBatch) -> tuple[Minibatch, ...]:
    """Whole groups for each update, spread over ranks and micro-batches; the same plan on every rank."""
    settings, ranks = trainee.config.trainer, trainee.ranks
    group_ids = batch.group_ids[batch.rollout_ids]
    whole = layout(batch.tokens, cu_seqlens=batch.cu_seqlens, targets=batch.loss_mask, temperatures=batch.temperatures,
                   group_ids=group_ids, records=batch.records)
    groups = np.unique(group_ids[whole.costs > 0])
    minibatches = []
    for chosen in np.array_split(groups, min(settings.minibatches_per_step, len(groups))):
        inside = np.isin(group_ids, chosen)
        packing = plan(np.where(inside, whole.costs, 0), shared=whole.shared, group_ids=group_ids, ranks=ranks.world_size,
                       microbatch_tokens=settings.microbatch_tokens, pair_cost=trainee.policy.flops.pair_cost)
        mask = torch.from_numpy(batch.loss_mask & np.repeat(inside, np.diff(batch.cu_seqlens)))
        minibatches.append(Minibatch(
            inputs=tuple(ForwardInputs.of(build(whole, sequences), ranks.device) for sequences in packing.ranks[ranks.rank]),
            packing=packing, loss_mask=mask.to(ranks.device), denominators=count(mask, cu_seqlens=torch.from_numpy(batch.cu_seqlens))))
    return tuple(minibatches)


def alone(trainee: Trainee, tokens: NDArray[np.int32], *, cu_seqlens: NDArray[np.int64], targets: NDArray[np.bool_],
          temperatures: NDArray[np.float32], records: TokenRecords = NOTHING) -> Iterator[ForwardInputs]:
    """This rank's micro-batches of sequences that have no group to share tokens with (arrays: `Layout`), made one at a time."""
    ids = np.arange(len(temperatures))
    whole = layout(tokens, cu_seqlens=cu_seqlens, targets=targets, temperatures=temperatures, group_ids=ids, records=records)
    packing = plan(whole.costs, shared=whole.shared, group_ids=ids, ranks=trainee.ranks.world_size,
                   microbatch_tokens=trainee.config.trainer.microbatch_tokens)
    for sequences in packing.ranks[trainee.ranks.rank]:
        yield ForwardInputs.of(build(whole, sequences), trainee.ranks.device)


def packing_metrics(minibatches: tuple[Minibatch, ...]) -> Metrics:
    """What their packings lose."""
    metrics = Metrics()
    for minibatch in minibatches:
        metrics.mean("train/packing_waste/mean", minibatch.packing.waste, count=1)
        metrics.mean("train/rank_imbalance/mean", minibatch.packing.imbalance, count=1)
    return metrics
