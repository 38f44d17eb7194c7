"""The kept sets of predictions as a mask that a chunk of logits makes for itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncrl.records import KeptSets


@dataclass(frozen=True, slots=True, eq=False)
class KeptRows:
    """Which ids each of P predictions is normalised over, as they were sampled among."""

    offsets: tuple[int, ...]
    """[P + 1] where the ids of each start; on the host, so that a chunk waits for no device."""
    rows: Tensor
    """[K] int64, the prediction each id belongs to."""
    ids: Tensor
    """[K] int64"""
    truncated: Tensor
    """[P] bool, whether it has a set; else it is normalised over the whole vocabulary."""

    @classmethod
    def of(cls, kept: KeptSets | None, device: torch.device) -> KeptRows | None:
        """None when every prediction is over the whole vocabulary."""
        if kept is None or not len(kept.ids):
            return None

        def put(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(device)

        return cls(tuple(kept.offsets.tolist()), put(np.repeat(np.arange(len(kept)), kept.counts)), put(kept.ids.astype(np.int64)),
                   put(kept.counts > 0))

    def mask_(self, logits: Tensor, chosen: slice) -> None:
        """Set the logits [n, V] of the predictions `chosen` to −inf outside their sets, in place."""
        start, end = self.offsets[chosen.start], self.offsets[chosen.stop]
        if start == end:
            return
        outside = self.truncated[chosen, None].repeat(1, logits.shape[1])
        outside[self.rows[start:end] - chosen.start, self.ids[start:end]] = False
        logits.masked_fill_(outside, -torch.inf)
