"""Runtime memory in published coordinates, and the check that a manifest fits it. NumPy only; nothing here writes by itself."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Protocol

import numpy as np

from asyncrl.errors import WeightSyncError
from asyncrl.weights.codec import Bits, Changes, holds, payload_bytes, put, take, word_dtype
from asyncrl.weights.manifest import Manifest, TensorEntry

_SHOWN = 3
"""Names in an error message."""


class Target(Protocol):
    """One tensor of the runtime model, by its checkpoint name and in checkpoint coordinates, wherever its elements lie."""

    @property
    def name(self) -> str:
        """The checkpoint's."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the checkpoint tensor."""

    @property
    def dtype(self) -> str:
        """At runtime; safetensors name."""

    def accepts(self, dtype: str) -> bool:
        """Whether published `dtype` fits exactly and can be read back."""

    def here(self, entry: TensorEntry, changes: Changes) -> Iterable[tuple[TensorEntry, Changes]]:
        """Those of `changes` whose elements are held here, as runs: all, where the whole tensor is. Of `EVERYWHERE`, all elements here."""

    def read(self, entry: TensorEntry, changes: Changes) -> Bits:
        """Published bits now at the places `changes` names. Raises WeightSyncError when memory holds what was never published."""

    def write(self, entry: TensorEntry, changes: Changes) -> None:
        """Put `changes` in place and read them back. Raises WeightSyncError when memory does not hold them afterwards."""


def fits(published: str, runtime: str) -> bool:
    """Whether published values fit a runtime dtype exactly and can be read back: the same dtype, or BF16 in F32."""
    return published == runtime or (published, runtime) == ("BF16", "F32")


@dataclass(frozen=True, slots=True, eq=False)
class MemoryTarget:
    """A target whose elements lie one after another in the memory of this process."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    memory: Bits
    """The tensor's own memory, flat, as raw bits of `dtype`."""

    def accepts(self, dtype: str) -> bool:
        """See `Target.accepts`."""
        return fits(dtype, self.dtype)

    def here(self, entry: TensorEntry, changes: Changes) -> Iterable[tuple[TensorEntry, Changes]]:
        """See `Target.here`."""
        return ((entry, changes),)

    def view(self, dtype: str) -> Bits:
        """The memory as published bits. BF16 is the upper half of F32, so no copy in the published dtype is kept."""
        return self.memory if dtype == self.dtype else self.memory.view("<u2")[1::2]

    def read(self, entry: TensorEntry, changes: Changes) -> Bits:
        """See `Target.read`."""
        span = slice(entry.start, entry.start + entry.length)
        if entry.dtype != self.dtype and np.any(take(self._lower_half[span], changes)):
            raise never_published(self.name, entry.dtype)
        return take(self.view(entry.dtype)[span], changes)

    def write(self, entry: TensorEntry, changes: Changes) -> None:
        """See `Target.write`."""
        span = slice(entry.start, entry.start + entry.length)
        put(self.view(entry.dtype)[span], changes)
        if entry.dtype != self.dtype:
            self._lower_half[span][changes.selection] = 0
            if np.any(take(self._lower_half[span], changes)):
                raise not_held(self.name)
        if not holds(self.view(entry.dtype)[span], changes):
            raise not_held(self.name)

    @property
    def _lower_half(self) -> Bits:
        """Of F32 memory: what BF16 has not."""
        return self.memory.view("<u2")[0::2]


def never_published(name: str, dtype: str) -> WeightSyncError:
    """What a target raises that holds more than the published dtype can say."""
    return WeightSyncError(f"{name} holds values that are no {dtype}: something other than weight sync wrote to it")


def not_held(name: str) -> WeightSyncError:
    """What a target raises whose memory differs from what was just written."""
    return WeightSyncError(f"{name} does not hold what was written to it")


def check_memory(targets: Mapping[str, MemoryTarget]) -> None:
    """Raise WeightSyncError unless all targets can be written and no two share memory."""
    spans = sorted((target.memory.ctypes.data, target.memory.nbytes, name) for name, target in targets.items() if target.memory.size)
    for (start, size, name), (following, _, other) in pairwise(spans):
        if start + size > following:
            raise WeightSyncError(f"{name} and {other} share memory: name tied weights once, as `checkpoint_tensors` does")
    for target in targets.values():
        if not target.memory.flags.writeable or target.memory.size != math.prod(target.shape):
            raise WeightSyncError(f"{target.name} must be writable, contiguous memory of shape {target.shape}")


def check_manifest(manifest: Manifest, targets: Mapping[str, Target], *, dtypes: Mapping[str, str] | None) -> None:
    """Raise WeightSyncError unless every entry fits the runtime model and its part, without overlap; an anchor must cover all of it.

    Args:
        dtypes: published dtype of each tensor in the base, which a delta keeps; None for an anchor.
    """
    for entry in manifest.tensors:
        _check_entry(entry, manifest, targets)
        if dtypes is not None and dtypes[entry.name] != entry.dtype:
            raise WeightSyncError(f"{entry.name} was published as {dtypes[entry.name]}, the delta has {entry.dtype}")
    covered = _coverage(manifest)
    if manifest.base is None:
        short = [name for name, target in targets.items() if covered.get(name, 0) != math.prod(target.shape)]
        if short:
            raise WeightSyncError(f"anchor {manifest.version} leaves {len(short)} tensors unset or in part: {', '.join(short[:_SHOWN])} …")
    _check_parts(manifest)


def _check_entry(entry: TensorEntry, manifest: Manifest, targets: Mapping[str, Target]) -> None:
    target = targets.get(entry.name)
    if target is None:
        raise WeightSyncError(f"the runtime model has no tensor {entry.name}")
    if entry.shape != target.shape:
        raise WeightSyncError(f"{entry.name} was published with shape {entry.shape}, the runtime model has {target.shape}")
    if not target.accepts(entry.dtype):
        raise WeightSyncError(f"{entry.name} is published as {entry.dtype}, which does not fit {target.dtype} at runtime exactly and "
                              "reversibly: publish in the runtime dtype, or BF16 for a F32 runtime")
    if manifest.base is None and entry.mode != "dense":
        raise WeightSyncError(f"{entry.name} is {entry.mode} in an anchor, which must be dense")
    if not (entry.start >= 0 and entry.length > 0 and entry.start + entry.length <= math.prod(target.shape)):
        raise WeightSyncError(f"{entry.name}: elements {entry.start} … {entry.start + entry.length} lie outside its shape {target.shape}")
    if not 0 <= entry.part < len(manifest.parts):
        raise WeightSyncError(f"{entry.name} names part {entry.part} of {len(manifest.parts)}")
    expected = payload_bytes(entry.mode, length=entry.length, count=entry.count, itemsize=word_dtype(entry.dtype).itemsize)
    if entry.bytes != expected:
        raise WeightSyncError(f"{entry.name}: payload of {entry.bytes} bytes should have {expected}")


def _check_parts(manifest: Manifest) -> None:
    """Payloads lie back to back and are all there is: no part can be made larger than what the model needs."""
    ends = [0] * len(manifest.parts)
    for entry in manifest.tensors:
        if entry.offset != ends[entry.part]:
            raise WeightSyncError(f"{entry.name}: its payload at {entry.offset} should be at {ends[entry.part]} of part {entry.part}")
        ends[entry.part] += entry.bytes
    for part, end in zip(manifest.parts, ends, strict=True):
        if part.bytes != end:
            raise WeightSyncError(f"part {part.path} should have the {end} bytes of its payloads, has {part.bytes}")


def _coverage(manifest: Manifest) -> dict[str, int]:
    """Elements covered, by tensor. Raises WeightSyncError when an element is covered twice or a tensor has two dtypes."""
    covered: dict[str, int] = {}
    ordered = sorted(manifest.tensors, key=lambda entry: (entry.name, entry.start))
    for name, entries in groupby(ordered, key=lambda entry: entry.name):
        end, dtype = 0, None
        covered[name] = 0
        for entry in entries:
            if entry.start < end or dtype not in (None, entry.dtype):
                raise WeightSyncError(f"{name}: pieces overlap at element {entry.start}, or differ in dtype")
            end, dtype = entry.start + entry.length, entry.dtype
            covered[name] += entry.length
    return covered
