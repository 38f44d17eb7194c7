"""One rank's side of publishing: what changed in its own shards since the previous published version. No gather. NumPy only.

    publish(bits, version, base)  →  parts in the store, RankPublication   nothing remembered yet
    committed(version)                                                     the manifest is durable: the snapshot moves on
    abandon()                                                              it never came to be: the snapshot stays

The snapshot is the previous *published* version, bit for bit as published, in one flat arena. A delta therefore always leads from
one committed version to the next, whatever single engines hold; each catches up by applying the versions it missed in order.
Frozen pieces are in anchors alone: nothing compares them, and no copy of them is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import numpy as np

from asyncrl.errors import WeightSyncError, WrongBase
from asyncrl.weights.codec import BLOCK_ELEMENTS, Bits, changed_indices, decode, encode, smallest_mode, word_dtype
from asyncrl.weights.manifest import Part, Piece, RankPublication, TensorEntry
from asyncrl.weights.state_hash import MODULUS, hash_bits, hash_delta, tensor_seed
from asyncrl.weights.store import StoreTransport

PART_BYTES = 512 << 20
"""Where a rank starts a new file; also the most that is encoded but not yet written."""

ENTRY_ELEMENTS = 64 * BLOCK_ELEMENTS
"""Longest run under one mode: bounds temporaries to some 100 MB, lets a large tensor be sparse here and dense there."""

_ALIGN_BYTES = 8
_NO_INDICES = np.empty(0, np.int64)


class Publisher:
    """Publishes the pieces one rank holds. All ranks call with the same `version` and `base`; `merge` joins the results.

    `frozen` names tensors that never change: a delta is made without them.
    """

    def __init__(self, pieces: Sequence[Piece], *, rank: int, store: StoreTransport, frozen: Collection[str] = (),
                 part_bytes: int = PART_BYTES) -> None:
        self._pieces = tuple(pieces)
        self._moving = tuple(piece for piece in pieces if piece.name not in frozen)
        self._rank, self._store, self._part_bytes = rank, store, part_bytes
        self._snapshots = dict(zip((piece.name for piece in self._moving), _arena(self._moving), strict=True))
        self._hash_share = 0
        self._pending: RankPublication | None = None
        self.version: int | None = None
        """Of the snapshot; None before the first commit."""

    def publish(self, bits: Iterable[tuple[Piece, Bits]], *, version: int, base: int | None) -> RankPublication:
        """Write what changed since `base` (everything when it is None) and return what `merge` needs.

        Args:
            bits: the pieces this publisher was made with, in that order, each with its current bits, flat; of a delta, those not frozen.
            version: larger than the snapshot's.
            base: the snapshot's version, or None for an anchor.

        Raises WrongBase or WeightSyncError; the snapshot stays then, and nothing is pending.
        """
        if self._pending is not None:
            raise WeightSyncError(f"version {self._pending.version} is neither committed nor abandoned")
        if base is not None and base != self.version:
            raise WrongBase(f"a delta on version {base} cannot be made: the snapshot holds {self.version}")
        if self.version is not None and version <= self.version:
            raise WeightSyncError(f"version {version} cannot follow version {self.version}: versions only grow")
        self._pending = self._write(self._checked(bits, self._pieces if base is None else self._moving), version=version, base=base)
        return self._pending

    def committed(self, version: int) -> None:
        """The manifest of the pending version is durable: make it the snapshot.

        Raises WeightSyncError when it is not pending or its files are gone or damaged; then abandon it and publish an anchor.
        """
        pending = self._pending
        if pending is None or pending.version != version:
            raise WeightSyncError(f"version {version} is not pending, {None if pending is None else pending.version} is")
        parts = [self._store.open_part(part) for part in pending.parts]
        origins = {piece.name: piece.start for piece in self._moving}
        for entry in (entry for entry in pending.entries if entry.name in origins):
            run = self._snapshots[entry.name][entry.start - origins[entry.name]:][:entry.length]
            payload = parts[entry.part][entry.offset:entry.offset + entry.bytes]
            changes = decode(payload, mode=entry.mode, dtype=entry.dtype, length=entry.length, count=entry.count)
            run[changes.selection] = changes.values
        self.version, self._hash_share, self._pending = version, pending.hash_share, None

    def abandon(self) -> None:
        """The pending version never came to be: the next delta is made against the old snapshot. Safe without one."""
        self._pending = None

    def adopt(self, bits: Iterable[tuple[Piece, Bits]], *, version: int) -> int:
        """Take `bits`, frozen ones too, as the snapshot of `version`, already published and held by the engines: for a restarted trainer.

        Returns the hash share; those of all ranks must add up to the manifest's state hash.
        """
        self._pending = None
        share = 0
        for piece, values in self._checked(bits, self._pieces):
            if piece.name in self._snapshots:
                self._snapshots[piece.name][:] = values
            share += hash_bits(tensor_seed(piece.name, piece.dtype), values, start=piece.start)
        self.version, self._hash_share = version, share % MODULUS
        return self._hash_share

    def anchor(self) -> RankPublication:
        """The snapshot's version once more, whole, for an engine that has no base. Changes nothing here; needs no commit.

        Raises WeightSyncError before the first commit, with frozen pieces, when the snapshot is no longer what was published, or on a
        failed write.
        """
        if self.version is None:
            raise WeightSyncError("there is no committed version to write an anchor of")
        if len(self._moving) < len(self._pieces):
            raise WeightSyncError("of frozen pieces no copy is kept: publish an anchor of a new version")
        whole = self._write(((piece, self._snapshots[piece.name]) for piece in self._pieces), version=self.version, base=None)
        if whole.hash_share != self._hash_share:
            raise WeightSyncError(f"the snapshot of version {self.version} was changed in memory: publish an anchor of a new version")
        return whole

    @staticmethod
    def _checked(bits: Iterable[tuple[Piece, Bits]], pieces: Sequence[Piece]) -> Iterator[tuple[Piece, Bits]]:
        given = iter(bits)
        for piece in pieces:
            got, values = next(given, (None, np.empty(0, np.uint8)))
            word = word_dtype(piece.dtype)
            if got != piece or values.shape != (piece.length,) or values.dtype != word:
                raise WeightSyncError(f"expected {piece} as flat {word}, got {got} with {values.shape} {values.dtype}")
            yield piece, values
        extra = next(given, None)
        if extra is not None:
            raise WeightSyncError(f"{extra[0]} is not a piece of this publisher")

    def _write(self, bits: Iterable[tuple[Piece, Bits]], *, version: int, base: int | None) -> RankPublication:
        bucket = _Buckets(lambda number, chunks: self._store.put_part(version, rank=self._rank, bucket=number, chunks=chunks),
                          self._part_bytes)
        entries: list[TensorEntry] = []
        share = 0 if base is None else self._hash_share
        for piece, values in bits:
            seed = tensor_seed(piece.name, piece.dtype)
            for low in range(0, piece.length, ENTRY_ELEMENTS):
                start, new = piece.start + low, values[low:low + ENTRY_ELEMENTS]
                if base is None:
                    count, mode, payload = len(new), "dense", encode(new, _NO_INDICES, mode="dense")
                    share += hash_bits(seed, new, start=start)
                else:
                    old = self._snapshots[piece.name][low:low + ENTRY_ELEMENTS]
                    indices = changed_indices(new, old)
                    count = len(indices)
                    mode = smallest_mode(length=len(new), count=count, itemsize=new.itemsize)
                    payload = encode(new, indices, mode=mode)
                    share += hash_delta(seed, indices, start=start, old=old[indices], new=new[indices])
                part, offset = bucket.add(payload)
                entries.append(TensorEntry(name=piece.name, dtype=piece.dtype, shape=piece.shape, mode=mode, part=part, offset=offset,
                                           bytes=len(payload), start=start, length=len(new), count=count))
        return RankPublication(version=version, base=base, parts=bucket.close(), entries=tuple(entries), hash_share=share % MODULUS)


class _Buckets:
    """Gathers payloads into parts of bounded size."""

    def __init__(self, put: Callable[[int, list[bytes]], Part], part_bytes: int) -> None:
        self._put, self._part_bytes = put, part_bytes
        self._parts: list[Part] = []
        self._chunks: list[bytes] = []
        self._size = 0

    def add(self, payload: bytes) -> tuple[int, int]:
        """Part index and offset the payload gets."""
        if self._chunks and self._size + len(payload) > self._part_bytes:
            self._flush()
        place = len(self._parts), self._size
        self._chunks.append(payload)
        self._size += len(payload)
        return place

    def close(self) -> tuple[Part, ...]:
        """All parts, written."""
        if self._chunks:
            self._flush()
        return tuple(self._parts)

    def _flush(self) -> None:
        self._parts.append(self._put(len(self._parts), self._chunks))
        self._chunks, self._size = [], 0


def _arena(pieces: Sequence[Piece]) -> list[Bits]:
    """Zeroed room for all pieces in one allocation, and each piece's view of it."""
    words = [word_dtype(piece.dtype) for piece in pieces]
    sizes = [-(-piece.length * word.itemsize // _ALIGN_BYTES) * _ALIGN_BYTES for piece, word in zip(pieces, words, strict=True)]
    arena = np.zeros(sum(sizes), np.uint8)
    ends = np.cumsum(sizes, dtype=np.int64)
    return [arena[end - size:end].view(word)[:piece.length] for piece, word, size, end in zip(pieces, words, sizes, ends, strict=True)]
