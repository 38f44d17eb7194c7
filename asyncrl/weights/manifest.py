"""The manifest of one published version: where its parts lie, which tensors they change, what state results."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Literal

Mode = Literal["blk16", "bitmap", "dense"]


@dataclass(frozen=True, slots=True)
class Part:
    """One file of a version, written by one rank."""

    path: str
    """Relative to the store."""
    bytes: int
    xxh3: str
    """xxh3-128 of the file, hexadecimal."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The changes of one contiguous piece of one checkpoint tensor."""

    name: str
    """Hugging Face name."""
    dtype: str
    """safetensors name: BF16, F32, …"""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    mode: Mode
    part: int
    """Index into `Manifest.parts`."""
    offset: int
    """First byte of the payload in the part."""
    bytes: int
    """Length of the payload."""
    start: int
    """Global flat index of the piece's first element."""
    length: int
    """Elements the piece covers."""
    count: int
    """Elements that changed (`length` when dense)."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an engine needs to move from `base` to `version`, and to prove it did."""

    run_epoch: int
    """Changes when versions could repeat, after a recovery that is not bit-equal."""
    version: int
    base: int | None
    """Version the changes apply to; None for an anchor, which is whole."""
    parts: tuple[Part, ...]
    tensors: tuple[TensorEntry, ...]
    state_hash: int
    """Of all published tensors after the update, modulo 2^64."""

    @property
    def payload_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.bytes for part in self.parts)

    @property
    def density(self) -> float:
        """Changed elements over all elements covered; 1 for an anchor."""
        covered = sum(entry.length for entry in self.tensors)
        return sum(entry.count for entry in self.tensors) / covered if covered else 0.0

    def to_json(self) -> str:
        """Stable text; `from_json` gives the manifest back."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """The manifest `to_json` wrote. Raises ValueError, KeyError or TypeError on anything else."""
        raw: dict[str, Any] = json.loads(text)
        parts = tuple(Part(**part) for part in raw.pop("parts"))
        tensors = tuple(TensorEntry(**(entry | {"shape": tuple(entry["shape"])})) for entry in raw.pop("tensors"))
        return cls(parts=parts, tensors=tensors, **raw)
