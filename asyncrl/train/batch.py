"""A batch as flat arrays: what every trainer rank maps from one safetensors file. NumPy only."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from asyncrl.errors import NonFiniteError, RunAborted, ShapeError, StalenessError
from asyncrl.records import NOTHING, TokenRecords, joined
from asyncrl.types import NOT_SAMPLED, Batch, Rollout, Sequence

_RECORDS = ("kept_counts", "kept_ids", "experts")
"""Names of the arrays of `TokenRecords`; a file has those there are."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """R rollouts of N sequences laid end to end, T tokens in all. Index t of a [T] array speaks of token t."""

    version: int
    """Policy version the step trains from."""
    tokens: NDArray[np.int32]
    """[T]"""
    loss_mask: NDArray[np.bool_]
    """[T], sampled and trainable; never set in a rollout that failed."""
    rollout_logprobs: NDArray[np.float32]
    """[T], 0 where not sampled."""
    turn_ids: NDArray[np.int16]
    """[T], -1 in the prompt."""
    policy_versions: NDArray[np.int32]
    """[T], `NOT_SAMPLED` where not sampled."""
    cu_seqlens: NDArray[np.int64]
    """[N + 1] where each sequence starts, and T."""
    temperatures: NDArray[np.float32]
    """[N] that each sequence was sampled at."""
    rollout_ids: NDArray[np.int64]
    """[N] row of `rewards` each sequence belongs to."""
    rewards: NDArray[np.float32]
    """[R], 0 where not valid."""
    group_ids: NDArray[np.int64]
    """[R]"""
    valid: NDArray[np.bool_]
    """[R], false for a rollout that failed: it has no place in its group's baseline."""
    records: TokenRecords = NOTHING
    """What the engines recorded of the T tokens."""

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens the policy sampled, trainable or not."""
        return int(np.count_nonzero(self.policy_versions != NOT_SAMPLED))

    @property
    def num_loss_tokens(self) -> int:
        """Tokens with a gradient before correction."""
        return int(np.count_nonzero(self.loss_mask))

    @property
    def sequence_ids(self) -> NDArray[np.int64]:
        """[T] which sequence each token belongs to."""
        return np.repeat(np.arange(len(self.temperatures)), np.diff(self.cu_seqlens))

    def check(self) -> None:
        """Raise ShapeError or NonFiniteError when the arrays contradict one another, StalenessError for a token newer than the version."""
        starts = self.cu_seqlens[:-1][np.diff(self.cu_seqlens) > 0]
        if bool(self.loss_mask[starts].any()):
            sequence = int(np.flatnonzero(self.loss_mask[self.cu_seqlens[:-1]])[0])
            raise ShapeError(f"sequence {sequence} has a trainable first token: nothing comes before it that could predict it")
        self.records.check(self.tokens)
        newest = int(self.policy_versions.max(initial=NOT_SAMPLED, where=self.loss_mask))
        if newest > self.version:
            raise StalenessError(f"a token was sampled by version {newest}, newer than version {self.version} the step trains from")
        for name, mask in (("rollout_logprobs", self.loss_mask), ("rewards", self.valid)):
            bad = np.flatnonzero(~np.isfinite(getattr(self, name)) & mask)
            if len(bad):
                raise NonFiniteError(f"{name}[{bad[0]}] = {getattr(self, name)[bad[0]]}: a batch with it cannot be trained")

    def save(self, path: Path) -> None:
        """Write the file `load` maps; the folder exists. Raises RunAborted where there is no room for it."""
        arrays = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name not in ("version", "records")}
        try:
            save_file(arrays | self.records.arrays(), path, metadata={"version": str(self.version)})
        except SafetensorError as error:
            raise RunAborted(f"the batch of version {self.version} cannot be written for the trainer: {error}") from error

    @classmethod
    def load(cls, path: Path) -> PackedBatch:
        """The batch `save` wrote."""
        with safe_open(path, "np") as file:
            records = TokenRecords.of_arrays({name: file.get_tensor(name) for name in _RECORDS if name in file.keys()})  # noqa: SIM118
            return cls(version=int(file.metadata()["version"]), records=records,
                       **{name: file.get_tensor(name) for name in file.keys() if name not in _RECORDS})  # noqa: SIM118


def pack(batch: Batch) -> PackedBatch:
    """The arrays of a batch, rollouts in its order. Raises ShapeError, NonFiniteError, StalenessError."""
    rollouts = batch.rollouts
    rows = [(index, sequence if not rollout.status.is_error else sequence.masked())
            for index, rollout in enumerate(rollouts) for sequence in rollout.sequences]
    sequences = [sequence for _, sequence in rows]
    valid = np.array([not rollout.status.is_error for rollout in rollouts], np.bool_)
    packed = PackedBatch(
        version=batch.version,
        tokens=_flat(sequences, "tokens", np.int32),
        loss_mask=_flat(sequences, "loss_mask", np.bool_),
        rollout_logprobs=_flat(sequences, "rollout_logprobs", np.float32),
        turn_ids=_flat(sequences, "turn_ids", np.int16),
        policy_versions=_flat(sequences, "policy_versions", np.int32),
        cu_seqlens=offsets(sequences),
        temperatures=np.array([rollouts[index].sampling.temperature for index, _ in rows], np.float32),
        rollout_ids=np.array([index for index, _ in rows], np.int64),
        rewards=np.array([_reward(rollout) for rollout in rollouts], np.float32),
        group_ids=np.array([rollout.group_id for rollout in rollouts], np.int64),
        valid=valid,
        records=joined([(sequence.records, len(sequence)) for sequence in sequences]),
    )
    packed.check()
    return packed


def offsets(sequences: list[Sequence]) -> NDArray[np.int64]:
    """[N + 1] running lengths, from 0 to T."""
    return np.concatenate([[0], np.cumsum([len(sequence) for sequence in sequences])]).astype(np.int64)


def _flat(sequences: list[Sequence], name: str, dtype: type[np.generic]) -> NDArray[np.generic]:
    return np.concatenate([np.empty(0, dtype), *(getattr(sequence, name) for sequence in sequences)]).astype(dtype, copy=False)


def _reward(rollout: Rollout) -> float:
    return 0.0 if rollout.status.is_error else rollout.reward
