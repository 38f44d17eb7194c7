"""Random batches that both sides get: ours packed with garbage wherever no loss token stands, theirs with zeros there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.correction import CorrectionBatch
from tests.parity.peers.client import Arrays, packed, padded

VERSION, GROUP_SIZE = 5, 4
GARBAGE = (np.nan, np.inf, -np.inf, 7.0, -1e30)


@dataclass(frozen=True, slots=True, eq=False)
class Scene:
    """N sequences of mixed lengths, whose prompts and some later spans are not the policy's."""

    arrays: Arrays
    """[T] each: rollout_logprobs, proximal_logprobs, logprobs, ref_logprobs, advantages, loss_mask, policy_versions."""
    rewards: NDArray[np.float64]
    """[N]"""
    lengths: NDArray[np.int64]
    """[N] tokens of each sequence, prompt and all; at least one is a loss token."""
    group_ids: NDArray[np.int64]
    """[N]"""

    @classmethod
    def draw(cls, seed: int, *, dtype: str, sequences: int = 8, longest: int = 24, spread: float = 0.4) -> Scene:
        """`spread` is the standard deviation of both gaps, engine to trainer and trainer to current weights."""
        rng = np.random.default_rng(seed)
        lengths = rng.integers(2, longest + 1, sequences)
        lengths[rng.integers(sequences)] = longest
        tokens = int(lengths.sum())
        first, last = np.cumsum(lengths) - lengths, np.cumsum(lengths) - 1
        mask = rng.random(tokens) < 0.8
        mask[first], mask[last] = False, True
        rollout = -rng.exponential(1.0, tokens) - 0.05
        proximal = np.minimum(rollout + rng.normal(0.0, spread, tokens), -0.01)
        current = np.minimum(proximal + rng.normal(0.0, spread, tokens), -0.01)
        reference = np.minimum(proximal + rng.normal(0.0, spread, tokens), -0.01)
        advantages = rng.normal(size=sequences).repeat(lengths)
        floats = {"rollout_logprobs": rollout, "proximal_logprobs": proximal, "logprobs": current, "ref_logprobs": reference,
                  "advantages": advantages}
        arrays = {name: values.astype(dtype) for name, values in floats.items()}
        versions = np.where(mask, rng.integers(0, VERSION + 1, tokens), -1).astype(np.int32)
        return cls({**arrays, "loss_mask": mask, "policy_versions": versions}, rng.normal(size=sequences), lengths,
                   np.arange(sequences) // GROUP_SIZE)

    @property
    def mask(self) -> NDArray[np.bool_]:
        """[T] of loss tokens."""
        return self.arrays["loss_mask"]

    @property
    def cu_seqlens(self) -> NDArray[np.int64]:
        """[N + 1]"""
        return np.concatenate([[0], self.lengths.cumsum()])

    def clean(self) -> Arrays:
        """[T], zeros where no loss token stands, as a framework that pads would have them; advantages stay."""
        as_they_are = ("loss_mask", "advantages", "policy_versions")
        return {name: values if name in as_they_are else np.where(self.mask, values, 0).astype(values.dtype)
                for name, values in self.arrays.items()}

    def packed(self) -> Arrays:
        """What a peer with packed tensors gets."""
        return {**self.clean(), "cu_seqlens": self.cu_seqlens}

    def padded(self) -> Arrays:
        """What a peer with padded tensors gets: [N, L], and [N] for what is one a sequence."""
        rows = padded(self.clean(), lengths=self.lengths)
        ends = padded({"token_rewards": np.where(self.is_last, self.rewards.repeat(self.lengths), 0.0)}, lengths=self.lengths)
        return {**rows, **ends, "rewards": self.rewards, "group_ids": self.group_ids, "lengths": self.lengths}

    @property
    def is_last(self) -> NDArray[np.bool_]:
        """[T] the last token of each sequence, a loss token."""
        return np.isin(np.arange(len(self.mask)), self.cu_seqlens[1:] - 1)

    def unpadded(self, rows: NDArray[np.generic]) -> NDArray[np.generic]:
        """[T] of [N, L], zero where no loss token stands, as ours is."""
        return np.where(self.mask, packed(np.broadcast_to(rows, (len(self.lengths), self.lengths.max())), lengths=self.lengths), 0)

    def tensor(self, name: str) -> torch.Tensor:
        """[T] with garbage outside the loss mask."""
        values = self.arrays[name].copy()
        if values.dtype.kind == "f":
            rubbish = np.resize(np.array(GARBAGE, dtype=values.dtype), len(values))
            values = np.where(self.mask, values, rubbish)
        return torch.from_numpy(values)

    def batch(self) -> CorrectionBatch:
        """For `correct`."""
        return CorrectionBatch(
            **{name: self.tensor(name) for name in ("rollout_logprobs", "proximal_logprobs", "advantages", "loss_mask", "policy_versions")},
            turn_ids=torch.where(self.tensor("loss_mask"), 0, -1), cu_seqlens=torch.from_numpy(self.cu_seqlens),
            group_ids=torch.from_numpy(self.group_ids), version=VERSION)
