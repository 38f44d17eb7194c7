"""Published versions as files: parts first, the manifest last, each under its final name only when whole.

    ROOT/v000123/part-RANK-BUCKET-CHECKSUM.bin      payloads, back to back
    ROOT/v000123/manifest.json                      {"manifest": …, "xxh3": "…"}

A part's name holds its checksum, so a file is never replaced by another content and a committed manifest stays true whatever is
written after it. One writer a rank, one committer, any number of readers.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from asyncrl.errors import WeightSyncError, WrongBase
from asyncrl.weights.manifest import Manifest, Part
from asyncrl.weights.transport import Buffer, HeldVersion

_MANIFEST = "manifest.json"


class StoreTransport:
    """Versions under one folder; in shared memory for engines on this machine."""

    def __init__(self, root: Path) -> None:
        self._root = root
        root.mkdir(parents=True, exist_ok=True)

    def put_part(self, version: int, *, rank: int, bucket: int, chunks: Iterable[Buffer]) -> Part:
        """Write the chunks as one file. Raises WeightSyncError, leaving nothing, when it cannot be written whole."""
        folder = self._folder(version)
        temporary = folder / f".part-{rank}-{bucket}.{os.getpid()}"
        checksum, size = xxhash.xxh3_128(), 0
        try:
            folder.mkdir(exist_ok=True)
            with temporary.open("wb") as file:
                for chunk in chunks:
                    file.write(chunk)
                    checksum.update(chunk)
                    size += len(chunk)
            digest = checksum.hexdigest()
            path = folder / f"part-{rank}-{bucket}-{digest[:16]}.bin"
            temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise WeightSyncError(f"part {bucket} of rank {rank}, version {version}, cannot be written: {error}") from error
        return Part(path=str(path.relative_to(self._root)), bytes=size, xxh3=digest)

    def commit(self, manifest: Manifest) -> None:
        """Make a version visible; its parts are already there. Raises WeightSyncError.

        Committing a version again is allowed (an anchor beside a delta, a repeated call) as long as it leads to the same state.
        """
        try:
            known = self._read(manifest.version)
        except WeightSyncError:
            known = None  # damaged: replaced by a whole one
        if known and known.run_epoch == manifest.run_epoch and known.state_hash != manifest.state_hash:
            raise WeightSyncError(f"version {manifest.version} of run epoch {manifest.run_epoch} was already published with another state")
        for part in manifest.parts:
            if self._size(part) != part.bytes:
                raise WeightSyncError(f"version {manifest.version} lacks its part {part.path}")
        text = manifest.to_json()
        path = self._folder(manifest.version) / _MANIFEST
        temporary = path.with_name(f".{_MANIFEST}.{os.getpid()}")
        try:
            path.parent.mkdir(exist_ok=True)
            temporary.write_text(f'{{"manifest": {text}, "xxh3": "{_digest(text)}"}}')
            temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise WeightSyncError(f"the manifest of version {manifest.version} cannot be written: {error}") from error

    def manifest(self, version: int) -> Manifest:
        """The committed manifest of a version. Raises WeightSyncError when there is none or it is damaged."""
        found = self._read(version)
        if found is None:
            raise WeightSyncError(f"version {version} is not in the store; it has {list(self.versions())}")
        return found

    def deliver(self, manifest: Manifest) -> None:
        """See `PartSink.deliver`. Engines pull."""

    def chain(self, manifest: Manifest, *, held: HeldVersion | None) -> Sequence[Manifest]:
        """See `PartSource.chain`."""
        chain = [manifest]
        while (base := chain[0].base) is not None and held != HeldVersion(manifest.run_epoch, base):
            if base >= chain[0].version:
                raise WrongBase(f"version {chain[0].version} names base {base}: a base is older than its version")
            try:
                before = self.manifest(base)
            except WeightSyncError as error:
                raise WrongBase(f"no chain leads from {held or 'nothing'} to version {manifest.version}: {error}") from error
            if before.run_epoch != manifest.run_epoch:
                raise WrongBase(f"version {base}, the base of {chain[0].version}, is of run epoch {before.run_epoch} in the store, "
                                f"not {manifest.run_epoch}")
            chain.insert(0, before)
        return chain

    def parts(self, manifest: Manifest) -> Sequence[NDArray[np.uint8]]:
        """See `PartSource.parts`."""
        return [self.open_part(part) for part in manifest.parts]

    def open_part(self, part: Part) -> NDArray[np.uint8]:
        """The bytes of a part, mapped read-only, size and checksum verified. Raises WeightSyncError.

        The mapping outlives `retain`.
        """
        size = self._size(part)
        if size != part.bytes:
            raise WeightSyncError(f"part {part.path} should have {part.bytes} bytes, has {'no file' if size is None else size}")
        try:
            data = np.asarray(np.memmap(self._path(part), np.uint8, mode="r")) if size else np.empty(0, np.uint8)
        except OSError as error:
            raise WeightSyncError(f"part {part.path} cannot be read: {error}") from error
        if xxhash.xxh3_128_hexdigest(data) != part.xxh3:
            raise WeightSyncError(f"part {part.path} is damaged: its xxh3-128 is not {part.xxh3}")
        return data

    def versions(self) -> tuple[int, ...]:
        """Committed versions, ascending."""
        return tuple(sorted(int(path.parent.name[1:]) for path in self._root.glob(f"v*/{_MANIFEST}")))

    def latest(self) -> int | None:
        """The newest committed version."""
        return max(self.versions(), default=None)

    def retain(self, oldest_version: int) -> None:
        """Delete every version below the oldest one that some engine still has to apply; the newest stays in any case."""
        latest = self.latest()
        for folder in self._root.glob("v*"):
            version = int(folder.name[1:])
            if version < oldest_version and latest is not None and version < latest:
                (folder / _MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(folder, ignore_errors=True)

    def _read(self, version: int) -> Manifest | None:
        path = self._folder(version) / _MANIFEST
        try:
            raw = json.loads(path.read_bytes())
            text = json.dumps(raw["manifest"], sort_keys=True)
            if _digest(text) != raw["xxh3"]:
                raise ValueError("its checksum does not match")
            found = Manifest.from_json(text)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise WeightSyncError(f"the manifest of version {version} is damaged: {error}") from error
        if found.version != version:
            raise WeightSyncError(f"the manifest of version {version} says it is version {found.version}")
        return found

    def _folder(self, version: int) -> Path:
        return self._root / f"v{version:06d}"

    def _path(self, part: Part) -> Path:
        path = self._root / part.path
        if not path.resolve().is_relative_to(self._root.resolve()):
            raise WeightSyncError(f"part {part.path} lies outside the store")
        return path

    def _size(self, part: Part) -> int | None:
        try:
            return self._path(part).stat().st_size
        except FileNotFoundError:
            return None


def _digest(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode())
