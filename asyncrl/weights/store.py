"""Published versions as files: parts first, the manifest last.

    ROOT/v000123/part-RANK-BUCKET-CHECKSUM.bin      payloads, back to back
    ROOT/v000123/delta.json, anchor.json            {"manifest": …, "xxh3": "…"}; either makes the version, both may be there

A part's name holds its checksum, so a file is never replaced by another content and a committed manifest stays true whatever is
written after it. One writer a rank, one committer, any number of readers.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from asyncrl.errors import ConfigError, WeightSyncError, WrongBase
from asyncrl.weights.config import StoreConfig
from asyncrl.weights.files import Files, LocalFiles
from asyncrl.weights.manifest import Manifest, Packed, Part
from asyncrl.weights.manifest_files import (
    ANCHOR,
    DELTA,
    StoredManifests,
    committed_paths,
    read_manifest,
    version_folder,
    version_of,
    write_manifest,
)
from asyncrl.weights.retention import superfluous
from asyncrl.weights.transport import Buffer, HeldVersion
from asyncrl.weights.ways import ways


def open_store(config: StoreConfig, *, folder: Path, run: str) -> StoreTransport:
    """The store that the settings name: the run's `folder` in shared memory, or what lies below `config.root`. Raises ConfigError."""
    root = config.root and config.root.removeprefix("file://")
    try:
        if root is None:
            files: Files = LocalFiles(folder, durable=False)
        elif "://" not in root:
            files = LocalFiles(Path(root).absolute() / run, durable=True)
        else:
            from asyncrl.weights.remote_files import RemoteFiles
            files = RemoteFiles(f"{root}{'' if root.endswith('/') else '/'}{run}")
    except (OSError, ImportError, ValueError) as error:
        raise unusable(config, error) from error
    if config.compression == "zstd":
        _require_zstandard()
    return StoreTransport(files, compression=config.compression, keep_bytes=config.keep_bytes)


def unusable(config: StoreConfig, error: Exception) -> ConfigError:
    """What to raise when versions cannot lie where the settings say."""
    return ConfigError("weights.transport.root", value=config.root,
                       allowed="a folder that can be written, or a URL that fsspec can write to",
                       remedy=f"{error}. Make it writable, install the package of its filesystem (s3fs for s3://) with its "
                              "credentials, or leave it out: then versions lie in the run's shared memory.")


class StoreTransport:
    """All three ends of a transport whose middle is a folder, or a filesystem of fsspec.

    Args:
        files: where versions lie; a path stands for a folder that need not outlive the machine.
        compression: of parts written here.
        keep_bytes: see `StoreConfig`.
    """

    def __init__(self, files: Files | Path, *, compression: Literal["none", "zstd"] = "none", keep_bytes: int | None = 0) -> None:
        self._files: Files = LocalFiles(files, durable=False) if isinstance(files, Path) else files
        self._compression, self._keep_bytes = compression, keep_bytes
        self._stored = StoredManifests(self._files)
        self._damaged: set[str] = set()

    def prove_writable(self) -> None:
        """Write a file and remove it. Raises OSError."""
        self._files.remove(self._files.write("probe", [b"asyncrl"], name=lambda: uuid.uuid4().hex))

    def put_part(self, version: int, *, rank: int, bucket: int, chunks: Iterable[Buffer]) -> Part:
        """See `PartSink.put_part`."""
        raw = _Measured(chunks)
        file = _Measured(_packed(raw)) if self._compression == "zstd" else raw
        try:
            path = self._files.write(version_folder(version), file, name=lambda: f"part-{rank}-{bucket}-{raw.xxh3[:16]}.bin")
        except OSError as error:
            raise WeightSyncError(f"part {bucket} of rank {rank}, version {version}, cannot be written: {error}") from error
        return Part(path=path, bytes=raw.bytes, xxh3=raw.xxh3, packed=None if file is raw else Packed(file.bytes, file.xxh3))

    def deliver(self, manifest: Manifest, *, engines: Sequence[str]) -> None:
        """See `PartSink.deliver`. Engines pull."""

    def commit(self, manifest: Manifest) -> None:
        """See `VersionLog.commit`."""
        version, epoch = manifest.version, manifest.run_epoch
        try:
            for known in filter(None, (self._read(version, name) for name in (DELTA, ANCHOR))):
                if known.run_epoch > epoch:
                    raise WeightSyncError(f"version {version} cannot be of run epoch {epoch}: {known.run_epoch} has begun")
                if known.run_epoch == epoch and known.state_hash != manifest.state_hash:
                    raise WeightSyncError(f"version {version} of run epoch {epoch} was already published with another state")
            lacking = self._lacking(manifest)
            if lacking is not None:
                raise WeightSyncError(f"version {version} lacks its part {lacking.path}")
            write_manifest(self._files, manifest)
        except OSError as error:
            raise WeightSyncError(f"the manifest of version {version} cannot be written: {error}") from error
        self._stored.committed(manifest)

    def chain(self, manifest: Manifest, *, held: HeldVersion | None) -> Sequence[Manifest]:
        """See `PartSource.chain`. Of all ways there, the one that moves the fewest bytes.

        One with a part that is not there whole, or was found damaged, only where there is no other.
        """
        if held is not None and manifest.base == held.version and manifest.run_epoch == held.run_epoch and self._is_whole(manifest):
            return [manifest]

        def find(version: int, anchor: bool) -> Manifest | None:
            found = None
            with suppress(OSError):  # what cannot be read is no way
                found = self._read(version, ANCHOR if anchor else DELTA)
            return found if found is not None and found.run_epoch == manifest.run_epoch else None

        found, why = ways(manifest, held=held, find=find)
        if not found:
            raise WrongBase(f"no chain leads from {held or 'nothing'} to version {manifest.version}: {why}")
        # ways share their links, and looking at one may be a round trip
        links = {(link.version, link.base): link for way in found for link in way}
        cost = {place: (not self._is_whole(link), link.payload_bytes) for place, link in links.items()}

        def cost_of(way: Sequence[Manifest]) -> tuple[bool, int]:
            broken, sizes = zip(*(cost[link.version, link.base] for link in way), strict=True)
            return any(broken), sum(sizes)

        return min(found, key=cost_of)

    def parts(self, manifest: Manifest) -> Sequence[NDArray[np.uint8]]:
        """See `PartSource.parts`."""
        return [self.open_part(part) for part in manifest.parts]

    def open_part(self, part: Part) -> NDArray[np.uint8]:
        """The bytes of a part, read-only, sizes and checksums verified; good after `retain`. Raises WeightSyncError."""
        self._damaged.add(part.path)
        try:
            data = self._files.open(part.path, size=part.file_bytes)
        except FileNotFoundError as error:
            raise WeightSyncError(f"part {part.path} should have {part.file_bytes} bytes, has no file") from error
        except OSError as error:
            raise WeightSyncError(f"part {part.path} cannot be read: {error}") from error
        if part.packed:
            _require_digest(part, data, part.packed.xxh3)
            data = _unpacked(part, data)
        _require_digest(part, data, part.xxh3)
        self._damaged.discard(part.path)
        return data

    def manifest(self, version: int) -> Manifest:
        """The committed manifest of a version, the delta where there is one. Raises WeightSyncError without one, or when it is damaged."""
        try:
            found = read_manifest(self._files, version, DELTA) or read_manifest(self._files, version, ANCHOR)
        except OSError as error:
            raise WeightSyncError(f"the manifest of version {version} cannot be read: {error}") from error
        if found is None:
            raise WeightSyncError(f"version {version} is not in the store; it has {list(self.versions())}")
        return found

    def versions(self) -> tuple[int, ...]:
        """Committed versions, ascending. Raises WeightSyncError if the store cannot be read."""
        with _reading():
            return tuple(sorted({version for version, _ in committed_paths(self._files.sizes())}))

    def latest(self) -> int | None:
        """The newest committed version."""
        return max(self.versions(), default=None)

    def newest_epoch(self) -> int | None:
        """See `VersionLog.newest_epoch`. Raises WeightSyncError if the store cannot be read."""
        with _reading():
            stored = self._stored.of(self._files.sizes())
        return max((link.run_epoch for link, _ in stored.values()), default=None)

    def retain(self, slowest: int | None) -> None:
        """See `VersionLog.retain`. What cannot be removed stays until the next time. Raises WeightSyncError if the store cannot be read."""
        with _reading():
            sizes = self._files.sizes()
            stored = self._stored.of(sizes)
        gone = set(superfluous([link for link, _ in stored.values()], slowest=slowest, keep_bytes=self._keep_bytes))
        kept = {path: both for path, both in stored.items() if both[0] not in gone}
        wanted = {part.path for _, manifest in kept.values() for part in manifest.parts}
        newest = max((link.version for link, _ in kept.values()), default=0)
        passed = newest if slowest is None else min(newest, slowest + 1)
        held = {link.version for link, _ in kept.values()}
        with suppress(OSError):
            for path, (_, manifest) in stored.items():
                if path not in kept:
                    self._files.remove(path)
                    for part in manifest.parts:
                        if part.path not in wanted:
                            self._files.remove(part.path)
            # what no manifest names: left by a rank that was killed, or a damaged manifest that nobody waits for
            for version in {version_of(path) for path in sizes} - held:
                if version is not None and version < passed:
                    self._files.remove_folder(version_folder(version))

    def _read(self, version: int, name: str) -> Manifest | None:
        """None where it is missing or damaged: a whole one may take its place, or another way be found."""
        with suppress(WeightSyncError):
            return read_manifest(self._files, version, name)
        return None

    def _lacking(self, manifest: Manifest) -> Part | None:
        folders = {part.path.partition("/")[0] for part in manifest.parts}
        sizes = {path: size for folder in folders for path, size in self._files.sizes(folder).items()}
        return next((part for part in manifest.parts if sizes.get(part.path) != part.file_bytes), None)

    def _is_whole(self, manifest: Manifest) -> bool:
        try:
            lacking = self._lacking(manifest)
        except OSError:
            return False
        return lacking is None and self._damaged.isdisjoint(part.path for part in manifest.parts)


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WeightSyncError(f"the store cannot be read: {error}") from error


class _Measured:
    """Chunks that pass by, and what they come to."""

    def __init__(self, chunks: Iterable[Buffer]) -> None:
        self._chunks, self._hash, self.bytes = chunks, xxhash.xxh3_128(), 0

    def __iter__(self) -> Iterator[Buffer]:
        for chunk in self._chunks:
            self._hash.update(chunk)
            self.bytes += len(chunk)
            yield chunk

    @property
    def xxh3(self) -> str:
        return self._hash.hexdigest()


def _require_digest(part: Part, data: NDArray[np.uint8], xxh3: str) -> None:
    if xxhash.xxh3_128_hexdigest(data) != xxh3:
        raise WeightSyncError(f"part {part.path} is damaged: its xxh3-128 is not {xxh3}")


def _require_zstandard() -> None:
    try:
        import asyncrl.weights.planes  # noqa: F401
    except ImportError as error:
        raise ConfigError("weights.transport.compression", value="zstd", allowed="none, without the package zstandard",
                          remedy="pip install 'asyncrl[zstd]', or leave it out.") from error


def _packed(chunks: Iterable[Buffer]) -> Iterator[Buffer]:
    from asyncrl.weights.planes import pack
    return pack(chunks)


def _unpacked(part: Part, data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    _require_zstandard()
    from asyncrl.weights.planes import unpack
    try:
        return unpack(data, size=part.bytes)
    except WeightSyncError as error:
        raise WeightSyncError(f"part {part.path}: {error}") from error
