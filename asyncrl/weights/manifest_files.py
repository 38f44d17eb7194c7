"""The manifests of a store: a delta's and an anchor's beside each other in the folder of a version."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

import xxhash

from asyncrl.errors import WeightSyncError
from asyncrl.weights.files import Files
from asyncrl.weights.manifest import Manifest
from asyncrl.weights.retention import StoredLink

DELTA, ANCHOR = "delta.json", "anchor.json"

_FOLDER = re.compile(r"v(\d{6,})")


def version_folder(version: int) -> str:
    """Where the files of a version lie."""
    return f"v{version:06d}"


def version_of(path: str) -> int | None:
    """The version whose folder a path begins with; None where it is none of ours."""
    match = _FOLDER.fullmatch(path.partition("/")[0])
    return int(match[1]) if match else None


def write_manifest(files: Files, manifest: Manifest) -> str:
    """Write it, checksum inside, and return its path. Raises OSError."""
    text = manifest.to_json()
    name = ANCHOR if manifest.base is None else DELTA
    whole = f'{{"manifest": {text}, "xxh3": "{_digest(text)}"}}'.encode()
    return files.write(version_folder(manifest.version), [whole], name=lambda: name)


def read_manifest(files: Files, version: int, name: str) -> Manifest | None:
    """None where there is none. Raises WeightSyncError when it is damaged, OSError when it cannot be read."""
    try:
        content = files.read(f"{version_folder(version)}/{name}")
    except FileNotFoundError:
        return None
    try:
        raw = json.loads(content)
        text = json.dumps(raw["manifest"], sort_keys=True)
        if _digest(text) != raw["xxh3"]:
            raise ValueError("its checksum does not match")
        found = Manifest.from_json(text)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WeightSyncError(f"the manifest of version {version} is damaged: {error}") from error
    if found.version != version or (found.base is None) != (name == ANCHOR):
        raise WeightSyncError(f"the manifest {name} of version {version} says it is version {found.version} on base {found.base}")
    return found


class StoredManifests:
    """All that a store holds, each read once; for the one process that commits."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._read: dict[str, tuple[StoredLink, Manifest]] = {}

    def committed(self, manifest: Manifest) -> None:
        """A manifest was written: what was read in its place is out of date."""
        path = f"{version_folder(manifest.version)}/{ANCHOR if manifest.base is None else DELTA}"
        self._read.pop(path, None)

    def of(self, sizes: Mapping[str, int]) -> dict[str, tuple[StoredLink, Manifest]]:
        """By path, among the files listed; damaged ones are left out. Raises OSError."""
        for path in list(self._read):
            if path not in sizes:
                del self._read[path]
        for version, path in committed_paths(sizes):
            if path not in self._read:
                try:
                    manifest = read_manifest(self._files, version, path.rpartition("/")[2])
                except WeightSyncError:
                    continue
                if manifest is not None:
                    size = manifest.payload_bytes + sizes[path]
                    self._read[path] = StoredLink(manifest.run_epoch, version, manifest.base, size), manifest
        return dict(self._read)


def committed_paths(sizes: Mapping[str, int]) -> Iterator[tuple[int, str]]:
    """Version and path of every manifest among the files listed."""
    for path in sizes:
        version = version_of(path)
        if version is not None and path.rpartition("/")[2] in (DELTA, ANCHOR):
            yield version, path


def _digest(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode())
