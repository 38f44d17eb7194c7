"""Files of a store on this machine or a network mount: whole under their name or not there, and, where asked for, proof against power cuts.

A path is relative to the root, parts joined by "/". What fails raises OSError; what is not there, FileNotFoundError.
"""

from __future__ import annotations

import mmap
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import WeightSyncError
from asyncrl.paths import sync
from asyncrl.weights.transport import Buffer

_PLAIN = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*", re.ASCII)
"""Paths that mean the same on every filesystem; none of ours needs another character."""


class Files(Protocol):
    """Where a store keeps its files."""

    def write(self, folder: str, chunks: Iterable[Buffer], *, name: Callable[[], str]) -> str:
        """Write one file and return its path; `name` is asked for when all chunks are taken. Nobody reads it before it is whole."""

    def read(self, path: str) -> bytes:
        """All of a small file."""

    def open(self, path: str, *, size: int) -> NDArray[np.uint8]:
        """The bytes of a file, read-only, good after it is removed. Raises OSError unless it has `size` bytes."""

    def sizes(self, folder: str = "") -> Mapping[str, int]:
        """Bytes by path, of one folder, or of all of them. Empty where there is none."""

    def remove(self, path: str) -> None:
        """Remove a file; one that is not there is no error."""

    def remove_folder(self, folder: str) -> None:
        """Remove a folder and what is in it."""


class LocalFiles:
    """Under a folder; files are mapped, not read.

    Args:
        durable: a file that was written outlives a power cut, and one that was written after it is never there without it.
    """

    def __init__(self, root: Path, *, durable: bool) -> None:
        self._root, self._durable = root, durable
        root.mkdir(parents=True, exist_ok=True)

    def write(self, folder: str, chunks: Iterable[Buffer], *, name: Callable[[], str]) -> str:
        """See `Files.write`."""
        place = self._inside(folder)
        temporary = place / f".{uuid.uuid4().hex}"
        place.mkdir(exist_ok=True)
        try:
            with temporary.open("xb") as file:
                for chunk in chunks:
                    file.write(chunk)
                if self._durable:
                    file.flush()
                    os.fsync(file.fileno())
            path = f"{folder}/{name()}"
            temporary.replace(self._inside(path))
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        if self._durable:
            sync(place)
            sync(self._root)
        return path

    def read(self, path: str) -> bytes:
        """See `Files.read`."""
        return self._inside(path).read_bytes()

    def open(self, path: str, *, size: int) -> NDArray[np.uint8]:
        """See `Files.open`."""
        with self._inside(path).open("rb") as file:
            found = os.fstat(file.fileno()).st_size
            require_size(path, found=found, size=size)
            if not size:
                return np.empty(0, np.uint8)
            return np.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ), np.uint8)

    def sizes(self, folder: str = "") -> dict[str, int]:
        """See `Files.sizes`."""
        found: dict[str, int] = {}
        for place in [self._inside(folder)] if folder else [path for path in _entries(self._root) if path.is_dir()]:
            for path in _entries(place):
                try:
                    found[f"{place.name}/{path.name}"] = path.stat().st_size
                except FileNotFoundError:
                    continue  # another process renamed or removed it since
        return found

    def remove(self, path: str) -> None:
        """See `Files.remove`."""
        self._inside(path).unlink(missing_ok=True)

    def remove_folder(self, folder: str) -> None:
        """See `Files.remove_folder`."""
        shutil.rmtree(self._inside(folder), ignore_errors=True)

    def _inside(self, path: str) -> Path:
        require_inside(path)
        place = self._root / path
        if not place.resolve().is_relative_to(self._root.resolve()):
            raise outside(path)
        return place


def require_inside(path: str) -> None:
    """Raise WeightSyncError for a path that leads out of the store, whatever kind of store it is."""
    if not _PLAIN.fullmatch(path):
        raise outside(path)


def outside(path: str) -> WeightSyncError:
    """What to raise for such a path."""
    return WeightSyncError(f"part {path!r} lies outside the store")


def require_size(path: str, *, found: int, size: int) -> None:
    """Raise OSError unless they are the same."""
    if found != size:
        raise OSError(f"{path} should have {size} bytes, has {found}")


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
