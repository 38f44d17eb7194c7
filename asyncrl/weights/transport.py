"""What moves published parts from trainer ranks to engines: three small ends and what lies between them. Needs no torch.

    rank     put_part(…) → Part             the bytes are on their way, or kept to be sent
    loop     commit(manifest)               the version exists from here on
    rank     deliver(manifest, engines)     returns when those engines have the parts; nothing to do where engines pull
    engine   chain(manifest, held)          the versions that lead there from what it holds
             parts(manifest)                their bytes, whole and verified
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from asyncrl.weights.manifest import Manifest, Part

Buffer = bytes | memoryview | NDArray[np.uint8]
"""Bytes of a payload."""


@dataclass(frozen=True, slots=True)
class HeldVersion:
    """What an engine's memory was proved to hold."""

    run_epoch: int
    version: int

    def __str__(self) -> str:
        return f"version {self.version} of run epoch {self.run_epoch}"


class PartSink(Protocol):
    """A rank's end."""

    def put_part(self, version: int, *, rank: int, bucket: int, chunks: Iterable[Buffer]) -> Part:
        """Take the chunks as one part. Raises WeightSyncError, leaving nothing, when it cannot be taken whole."""

    def deliver(self, manifest: Manifest, *, engines: Sequence[str]) -> None:
        """Send what engines do not pull themselves to those that are fetching it now; every rank is to call this at the same time.

        Returns when they have it, or are known to be missing. Raises WeightSyncError, within a time-out, when none has it.
        """


class PartSource(Protocol):
    """An engine's end."""

    def chain(self, manifest: Manifest, *, held: HeldVersion | None) -> Sequence[Manifest]:
        """Committed versions, oldest first, that lead from `held` to `manifest`, which is the last: deltas on what is held, or an anchor
        and deltas on it. Raises WrongBase when a link is missing."""

    def parts(self, manifest: Manifest) -> Sequence[NDArray[np.uint8]]:
        """The bytes of all parts of one version, read-only, sizes and checksums verified. Raises WeightSyncError."""


class VersionLog(Protocol):
    """The controller's end."""

    def newest_epoch(self) -> int | None:
        """Of all committed versions, those of earlier runs too; None without any."""

    def commit(self, manifest: Manifest) -> None:
        """Make a version visible; its parts are already there, or on their way. Raises WeightSyncError.

        A version may come again, as an anchor beside a delta or as a repeated call, if it leads to the same state.
        """

    def retain(self, slowest: int | None) -> None:
        """Let go of what no serving engine needs; the slowest holds version `slowest` of the newest run epoch, None: none serves."""
