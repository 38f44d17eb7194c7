"""How many published values the updates since the last publication should have changed: what one rank can tell of its shards."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncrl.train.optim import Optimizer
from asyncrl.train.parallel import Ranks, local
from asyncrl.weights.density import Prediction, Travel, change_rates, sample_places, settled_updates, step_share
from asyncrl.weights.torch_pieces import DTYPE_NAMES, PublishedDtype


class DensityForecast:
    """Looks at a sample of the weights that `optimizer` moves, which are those a delta compares."""

    def __init__(self, optimizer: Optimizer, *, beta1: float, dtype: PublishedDtype, ranks: Ranks) -> None:
        self._optimizer, self._beta1, self._ranks = optimizer, beta1, ranks
        self._dtype = DTYPE_NAMES[getattr(torch, dtype)]
        self._updates_before = 0

    def published(self) -> None:
        """The current weights are a published version: what moves from here on is the next delta's."""
        self._optimizer.travel, self._updates_before = Travel(), self._optimizer.updates

    def of_delta(self) -> Mapping[str, float] | None:
        """The `Prediction` for a delta published now, as it travels; None while AdamW's moments settle, whose steps are longer."""
        if self._updates_before < settled_updates(self._beta1):
            return None
        values, weights, factors = self._sampled()
        steps = step_share(self._beta1) * self._optimizer.travel.length * factors
        changed = float(weights @ change_rates(values, dtype=self._dtype, steps=steps))
        return Prediction(changed=changed, elements=round(float(weights.sum()))).to_wire()

    def _sampled(self) -> tuple[NDArray[np.float32], NDArray[np.float64], NDArray[np.float64]]:
        """Values, how many each stands for, and the factors of their learning rates; one copy from the device."""
        if not self._places:
            return np.empty(0, np.float32), np.empty(0), np.empty(0)
        shards, places = self._held(), self._places
        values = torch.cat([shard.detach().reshape(-1)[place] for (shard, _), place in zip(shards, places, strict=True)])
        counts = [len(place) for place in places]
        weights = np.repeat([shard.numel() / count for (shard, _), count in zip(shards, counts, strict=True)], counts)
        return values.float().cpu().numpy(), weights, np.repeat([factor for _, factor in shards], counts)

    @functools.cached_property
    def _places(self) -> list[Tensor]:
        found = sample_places(shard.numel() for shard, _ in self._held())
        return [torch.from_numpy(place).to(self._ranks.device) for place in found]

    def _held(self) -> list[tuple[Tensor, float]]:
        """What this rank publishes: its shards, and from the lowest rank what has none."""
        trained = self._optimizer.trained()
        held = [(local(parameter), factor) for parameter, factor in trained if isinstance(parameter, DTensor) or self._ranks.rank == 0]
        return [(shard, factor) for shard, factor in held if shard.numel()]
