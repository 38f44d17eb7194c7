"""What was recorded of a running request and waits to be delivered with its tokens. NumPy only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from asyncrl.records import NOTHING, KeptSets, TokenRecords, Wanted


class PendingRecords:
    """Of one request; each sampled token and each one that passes through the model is told once, in order."""

    def __init__(self, wanted: Wanted, *, prompt_tokens: int) -> None:
        self.wanted = wanted
        self._kept: list[NDArray[np.int32]] = []
        self._experts: list[NDArray[np.int16]] = []
        self._passed = self._delivered = 0
        self._inputs = prompt_tokens - 1

    def sampled(self, kept: NDArray[np.int32]) -> None:
        """The set that a token was sampled among, empty for the whole vocabulary."""
        if self.wanted.kept_sets:
            self._kept.append(kept)

    def passed(self, experts: NDArray[np.int16], *, start: int) -> None:
        """The experts [m, L, k] of the tokens from `start` on. Of one that passes again, under other weights, the first record stays."""
        if not self.wanted.routed_experts:
            return
        assert start <= self._passed, "no engine that records leaves out a token"
        new = experts[self._passed - start:]
        if len(new):
            self._experts.append(new)
            self._passed += len(new)

    def take(self, count: int) -> TokenRecords:
        """What belongs to a chunk of the next `count` sampled tokens."""
        if not count:
            return NOTHING
        self._inputs += count
        kept = experts = None
        if self.wanted.kept_sets:
            kept, self._kept = KeptSets.of(self._kept[:count]), self._kept[count:]
        if self._experts:
            rows, split = np.concatenate(self._experts), self._inputs - self._delivered
            experts, self._experts, self._delivered = rows[:split], [rows[split:]], self._inputs
        return TokenRecords(kept, experts)
