"""What the records of a batch came to: how much of the vocabulary was left out, how far the replay of experts reaches."""

from __future__ import annotations

import numpy as np

from asyncrl.metrics import Metrics
from asyncrl.train.batch import PackedBatch
from asyncrl.train.trainee import Trainee


def record_metrics(trainee: Trainee, batch: PackedBatch) -> Metrics:
    """Of the loss tokens of the batch, and of the forwards of the policy since the last call; every rank calls it.

    Nothing of what is not recorded.
    """
    metrics = Metrics()
    if batch.records.kept is not None:
        sizes = batch.records.kept.counts[batch.loss_mask]
        metrics.mean("train/truncated/frac", np.count_nonzero(sizes), count=len(sizes))
        metrics.mean("train/kept_ids/mean", int(sizes.sum()), count=np.count_nonzero(sizes))
    routing = trainee.policy.routing
    if routing is not None:
        rows, replayed, flipped = trainee.ranks.sum(routing.counted(trainee.ranks.device)).tolist()
        metrics.mean("train/routing_replayed/frac", replayed, count=rows)
        metrics.mean("train/routing_flips/frac", flipped, count=replayed)
    return metrics
