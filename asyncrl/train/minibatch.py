"""The shares of a batch that a step's updates take: whole groups, spread over ranks and micro-batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncrl.correction.aggregate import Denominators, count
from asyncrl.correction.batch import Corrected, CorrectionBatch
from asyncrl.metrics import Metrics
from asyncrl.train.batch import PackedBatch
from asyncrl.train.flops import ModelFlops
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
    flops = ModelFlops.of(trainee.policy.lm.config, shapes=[parameter.shape for parameter in trainee.policy.lm.parameters()])
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


def packing_metrics(minibatches: tuple[Minibatch, ...]) -> Metrics:
    """What their packings lose."""
    metrics = Metrics()
    for minibatch in minibatches:
        metrics.mean("train/packing_waste/mean", minibatch.packing.waste, count=1)
        metrics.mean("train/rank_imbalance/mean", minibatch.packing.imbalance, count=1)
    return metrics
