"""One rank's side of publishing: what changed in its own shards since the previous published version. No gather. Needs no torch.

    publish(bits, version, base)  →  parts at the sink, RankPublication    the snapshot moves on as it is compared; what it held is logged
    committed(version)                                                     the manifest is durable: the log goes
    abandon()                                                              it never came to be: the log is played back

The snapshot is the previous *published* version, bit for bit as published, in one flat memory that is scanned stretch by stretch, however
many tensors lie in it. A delta therefore always leads from one committed version to the next, whatever single engines hold; each catches
up with what it missed. Frozen pieces are in anchors alone: nothing compares them, and no copy of them is kept.

Beside the snapshot a publication needs at most two buckets: what is encoded and not yet written, the log, and what a scan works in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

from asyncrl.errors import NonFiniteError, WeightSyncError, WrongBase
from asyncrl.weights.buckets import Buckets
from asyncrl.weights.codec import Bits
from asyncrl.weights.encoder import Found, Scratch, not_finite_place
from asyncrl.weights.kernels import kernels_for
from asyncrl.weights.manifest import Mode, Piece, RankPublication, TensorEntry
from asyncrl.weights.piece_bits import PieceBits, Run, Stretch, snapshot_places, stretches_of
from asyncrl.weights.snapshot import HostSnapshot, Snapshot, staged
from asyncrl.weights.state_hash import MODULUS
from asyncrl.weights.transport import PartSink
from asyncrl.weights.undo_log import UndoLog

PART_BYTES = 512 << 20
"""Where a rank starts a new file."""

LOG_FRACTION = 0.75
"""Of a bucket, that old bits may take; the rest is for what a scan works in, some tens of megabytes a thread."""


class MakeSnapshot(Protocol):
    """What `Publisher` keeps the published bits in."""

    def __call__(self, nbytes: int, *, threads: int) -> Snapshot:
        """Zeroed, of so many bytes."""


class Publisher:
    """Publishes the pieces one rank holds. All ranks call with the same `version` and `base`; `merge` joins the results.

    Args:
        frozen: names of tensors that never change: a delta is made without them.
        threads: that may scan side by side.
        snapshot: where the published bits are kept: by default in the memory of the host.
    """

    def __init__(self, pieces: Sequence[Piece], *, rank: int, sink: PartSink, frozen: Collection[str] = (), part_bytes: int = PART_BYTES,
                 threads: int = 1, snapshot: MakeSnapshot | None = None) -> None:
        self._pieces = tuple(pieces)
        self._moving = tuple(piece for piece in pieces if piece.name not in frozen)
        self._rank, self._sink, self._part_bytes = rank, sink, part_bytes
        self._kernels = kernels_for(sum(piece.length for piece in pieces))
        places, nbytes = snapshot_places(self._moving)
        self._snapshot = (snapshot or self._on_the_host)(nbytes, threads=threads)
        most = self._snapshot.most_elements
        self._all = stretches_of(self._pieces, places=places, most_elements=most)
        self._changing = stretches_of(self._moving, places=places, most_elements=most)
        self._log = UndoLog(int(part_bytes * LOG_FRACTION))
        self._hash_share = 0
        self._newest: int | None = None
        self._pending: RankPublication | None = None
        self.version: int | None = None
        """Of the snapshot; None before the first commit, and when the snapshot was lost: then an anchor must follow."""

    @property
    def snapshot_bytes(self) -> int:
        """Memory that the bits published last take."""
        return self._snapshot.nbytes

    def publish(self, bits: PieceBits, *, version: int, base: int | None) -> RankPublication:
        """Hand what changed since `base` (everything when it is None) to the sink and return what `merge` needs.

        Args:
            bits: current ones of the pieces this publisher was made with, in that order; of a delta, of those not frozen.
            version: larger than any before.
            base: the snapshot's version, or None for an anchor.

        Raises WrongBase, WeightSyncError or NonFiniteError; nothing is pending then, and the snapshot is as `abandon` leaves it.
        """
        if self._pending is not None:
            raise WeightSyncError(f"version {self._pending.version} is neither committed nor abandoned")
        if base is not None and base != self.version:
            raise WrongBase(f"a delta on version {base} cannot be made: the snapshot holds {self.version}")
        if self._newest is not None and version <= self._newest:
            raise WeightSyncError(f"version {version} cannot follow version {self._newest}: versions only grow")
        self._check(bits, self._pieces if base is None else self._moving)
        try:
            with Buckets(self._sink, version=version, rank=self._rank, part_bytes=self._part_bytes) as buckets:
                if base is None:
                    self._pending = self._whole(self._taken(bits), buckets, version=version)
                else:
                    self._pending = self._delta(bits, buckets, version=version, base=base)
        except BaseException:
            self._roll_back()
            raise
        return self._pending

    def committed(self, version: int) -> None:
        """The manifest of the pending version is durable: it is the snapshot from now on. Raises WeightSyncError when it is not pending."""
        pending = self._pending
        if pending is None or pending.version != version:
            raise WeightSyncError(f"version {version} is not pending, {None if pending is None else pending.version} is")
        self._log.clear()
        self.version = self._newest = version
        self._hash_share, self._pending = pending.hash_share, None

    def abandon(self) -> None:
        """The pending version never came to be: the next delta is made against the old snapshot. Safe without one.

        Where the old bits were too many to keep, and after an anchor, the snapshot is lost: `version` is None, and an anchor must follow.
        """
        if self._pending is not None:
            self._roll_back()
            self._pending = None

    def adopt(self, bits: PieceBits, *, version: int) -> int:
        """Take `bits`, frozen ones too, as the snapshot of `version`, already published and held by the engines: for a restarted trainer.

        Returns the hash share; those of all ranks must add up to the manifest's state hash.
        """
        self._check(bits, self._pieces)
        self._pending = self.version = None
        self._log.clear()
        share = sum(self._hash(stretch, values) for stretch, values in self._taken(bits)) % MODULUS
        self._log.clear()
        self.version = self._newest = version
        self._hash_share = share
        return share

    def anchor(self, bits: PieceBits | None = None) -> RankPublication:
        """The snapshot's version once more, whole, for an engine that has no base. Changes nothing here; needs no commit.

        Args:
            bits: current ones of all pieces, where some are frozen: of these no copy is kept. Of others they are not read.

        Raises WeightSyncError before the first commit, while a version is pending, with frozen pieces and no bits, when what was published
        has changed in memory, or on a failed write.
        """
        if self._pending is not None:
            raise WeightSyncError(f"version {self._pending.version} is pending: commit or abandon it first")
        if self.version is None:
            raise WeightSyncError("there is no committed version to write an anchor of")
        if bits is not None:
            self._check(bits, self._pieces)
        elif len(self._moving) < len(self._pieces):
            raise WeightSyncError("of frozen pieces no copy is kept: give their bits, or publish an anchor of a new version")
        with Buckets(self._sink, version=self.version, rank=self._rank, part_bytes=self._part_bytes) as buckets:
            held = ((stretch, self._snapshot.read(stretch) if stretch.place is not None or bits is None
                     else staged(bits, stretch, Scratch())) for stretch in self._all)
            whole = self._whole(held, buckets, version=self.version)
        if whole.hash_share != self._hash_share:
            raise WeightSyncError(f"what version {self.version} was made of was changed in memory: publish an anchor of a new version")
        return whole

    def _on_the_host(self, nbytes: int, *, threads: int) -> Snapshot:
        return HostSnapshot(nbytes, kernels=self._kernels, threads=threads)

    @staticmethod
    def _check(bits: PieceBits, pieces: Sequence[Piece]) -> None:
        given = tuple(bits.pieces)
        if given != tuple(pieces):
            at = next((place for place, (got, piece) in enumerate(zip(given, pieces, strict=False)) if got != piece),
                      min(len(given), len(pieces)))
            raise WeightSyncError(f"piece {at} of {len(pieces)} should be {pieces[at] if at < len(pieces) else 'none'}, "
                                  f"is {given[at] if at < len(given) else 'missing'}")

    def _taken(self, bits: PieceBits) -> Iterator[tuple[Stretch, Bits]]:
        """Everything there is now, which becomes the snapshot, stretch by stretch."""
        self._log.lose()
        for stretch in self._all:
            values = staged(bits, stretch, Scratch()) if stretch.place is None else self._snapshot.fill(bits, stretch)
            if bits.finite and (place := not_finite_place(values, stretch.dtype, self._kernels)) is not None:
                raise _not_finite(next(run for run, end in zip(stretch.runs, stretch.lengths.cumsum(), strict=True) if place < end))
            yield stretch, values

    def _whole(self, held: Iterator[tuple[Stretch, Bits]], buckets: Buckets, *, version: int) -> RankPublication:
        entries: list[TensorEntry] = []
        share = 0
        for stretch, values in held:
            share += self._hash(stretch, values)
            sizes = [run.length * values.itemsize for run in stretch.runs]
            places = buckets.add(values.view("u1"), sizes, owned=stretch.place is None)
            entries += [_entry(run, "dense", count=run.length, place=place, size=size)
                        for run, place, size in zip(stretch.runs, places, sizes, strict=True)]
        return RankPublication(version=version, base=None, parts=buckets.close(), entries=tuple(entries), hash_share=share % MODULUS)

    def _delta(self, bits: PieceBits, buckets: Buckets, *, version: int, base: int) -> RankPublication:
        entries: list[TensorEntry] = []
        share = self._hash_share
        for stretch, found in self._moved(bits):
            if found.not_finite is not None:
                raise _not_finite(stretch.runs[found.not_finite])
            share += found.hash_change
            places = buckets.add(found.payloads, found.sizes, owned=True, beside=self._log.bytes)
            entries += [_entry(run, mode, count=count, place=place, size=size) for run, mode, count, place, size in
                        zip(stretch.runs, found.modes, found.counts.tolist(), places, found.sizes, strict=True)]
        return RankPublication(version=version, base=base, parts=buckets.close(), entries=tuple(entries), hash_share=share % MODULUS)

    def _moved(self, bits: PieceBits) -> Iterator[tuple[Stretch, Found]]:
        """What changed, stretch by stretch; the snapshot has moved, and what it held is in the log."""
        for first in range(0, len(self._changing), self._snapshot.at_once):
            stretches = self._changing[first:first + self._snapshot.at_once]
            with self._log.lost_meanwhile():
                found = self._snapshot.move(bits, stretches)
            for stretch, one in zip(stretches, found, strict=True):
                self._log.add(stretch, one.undo)
            yield from zip(stretches, found, strict=True)

    def _hash(self, stretch: Stretch, values: Bits) -> int:
        return int(self._kernels.hash_runs(stretch.lengths, stretch.origins, values))

    def _roll_back(self) -> None:
        if not self._log.play_back(self._snapshot):
            self.version = None


def _entry(run: Run, mode: Mode, *, count: int, place: tuple[int, int], size: int) -> TensorEntry:
    part, offset = place
    return TensorEntry(name=run.piece.name, dtype=run.piece.dtype, shape=run.piece.shape, mode=mode, part=part, offset=offset, bytes=size,
                       start=run.start, length=run.length, count=count)


def _not_finite(run: Run) -> NonFiniteError:
    return NonFiniteError(f"{run.piece.name} holds a value that is not finite as {run.piece.dtype}; it is not published")
