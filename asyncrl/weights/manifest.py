"""The manifest of one published version: where its parts lie, which tensors they change, what state results."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from asyncrl.errors import WeightSyncError

Mode = Literal["blk16", "bitmap", "dense"]

_WHOLE = ConfigDict(extra="forbid")
"""A field nobody knows changes what the others mean."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A contiguous run of one checkpoint tensor: what one rank holds of it, in coordinates every rank and engine shares."""

    name: str
    """Hugging Face name."""
    dtype: str
    """As published; safetensors name."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: int
    """Flat index of the first element in the whole tensor."""
    length: int
    """Elements."""


@dataclass(frozen=True, slots=True)
class Packed:
    """The file of a part that is kept in planes, compressed."""

    __pydantic_config__ = _WHOLE

    bytes: int
    xxh3: str
    """xxh3-128 of the file, hexadecimal."""


@dataclass(frozen=True, slots=True)
class Part:
    """Payloads that one rank wrote, back to back: one file of a version."""

    __pydantic_config__ = _WHOLE

    path: str
    """Relative to the store."""
    bytes: int
    xxh3: str
    """xxh3-128 of the payloads, hexadecimal."""
    packed: Packed | None = None
    """What the file is; None: the payloads as they are."""

    @property
    def file_bytes(self) -> int:
        """Of the file."""
        return self.packed.bytes if self.packed else self.bytes


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The changes of one contiguous piece of one checkpoint tensor."""

    __pydantic_config__ = _WHOLE

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
    """Elements that changed, whatever the mode; `length` in an anchor."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an engine needs to move from `base` to `version`, and to prove it did."""

    __pydantic_config__ = _WHOLE

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
        """Bytes of all parts, as they travel."""
        return sum(part.file_bytes for part in self.parts)

    @property
    def density(self) -> float:
        """Changed elements over all elements covered; 1 for an anchor."""
        covered = sum(entry.length for entry in self.tensors)
        return sum(entry.count for entry in self.tensors) / covered if covered else 0.0

    def to_json(self) -> str:
        """Stable text; `from_json` gives the manifest back."""
        return json.dumps(_plain(self, entries="tensors"), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """The manifest `to_json` wrote. Raises ValueError, naming the first field that is missing, unknown or of another type."""
        try:
            return _MANIFEST.validate_json(text, strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            raise ValueError(f"{'.'.join(map(str, first['loc'])) or 'all of it'}: {first['msg']}") from None


@dataclass(frozen=True, slots=True)
class RankPublication:
    """What one rank wrote of a version; `merge` makes the manifest of all of them."""

    version: int
    base: int | None
    parts: tuple[Part, ...]
    entries: tuple[TensorEntry, ...]
    """`part` counts within this rank."""
    hash_share: int
    """State hash of the rank's pieces after the update."""

    def to_wire(self) -> dict[str, Any]:
        """A form JSON and msgpack can carry; `from_wire` gives the publication back."""
        return _plain(self, entries="entries")

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> RankPublication:
        """The publication `to_wire` described."""
        parts = tuple(Part(**(part | {"packed": part["packed"] and Packed(**part["packed"])})) for part in wire["parts"])
        entries = tuple(TensorEntry(**(entry | {"shape": tuple(entry["shape"])})) for entry in wire["entries"])
        return cls(**(dict(wire) | {"parts": parts, "entries": entries}))


def merge(publications: Sequence[RankPublication], *, run_epoch: int, version: int, base: int | None) -> Manifest:
    """The manifest of what all ranks wrote, in rank order. Raises WeightSyncError when a rank speaks of another version or base."""
    parts: list[Part] = []
    entries: list[TensorEntry] = []
    for rank, publication in enumerate(publications):
        if (publication.version, publication.base) != (version, base):
            raise WeightSyncError(f"rank {rank} published version {publication.version} on base {publication.base}, "
                                  f"not {version} on base {base}")
        entries += [dataclasses.replace(entry, part=entry.part + len(parts)) for entry in publication.entries]
        parts += publication.parts
    state_hash = sum(publication.hash_share for publication in publications) % (1 << 64)
    return Manifest(run_epoch=run_epoch, version=version, base=base, parts=tuple(parts), tensors=tuple(entries), state_hash=state_hash)


_MANIFEST = TypeAdapter(Manifest)
_ENTRY_FIELDS = tuple(field.name for field in dataclasses.fields(TensorEntry))


def _plain(whole: Manifest | RankPublication, *, entries: str) -> dict[str, Any]:
    """`dataclasses.asdict`, which copies every value deeply, at a quarter of its time: there are thousands of entries."""
    plain = {field.name: getattr(whole, field.name) for field in dataclasses.fields(whole)}
    return plain | {"parts": [dataclasses.asdict(part) for part in whole.parts],
                    entries: [{name: getattr(entry, name) for name in _ENTRY_FIELDS} for entry in plain[entries]]}
