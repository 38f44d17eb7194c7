"""Files of a store behind a URL, through fsspec: object stores and whatever else has a filesystem there.

There is no rename: a part may be seen half written, which its size and checksum in the manifest tell, and the manifest is one put.
Files are pulled into memory, whole.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import fsspec
import numpy as np
from numpy.typing import NDArray

from asyncrl.paths import shared_place
from asyncrl.weights.files import require_inside, require_size
from asyncrl.weights.transport import Buffer

PULL_BYTES = 16 << 20
"""Asked for at once: large against a round trip, small against a part."""


class RemoteFiles:
    """Under a URL. Raises ImportError where the package of its filesystem is missing, ValueError for a URL of no known kind."""

    def __init__(self, url: str) -> None:
        self._files, root = fsspec.core.url_to_fs(url)
        self._root = root.rstrip("/")

    def write(self, folder: str, chunks: Iterable[Buffer], *, name: Callable[[], str]) -> str:
        """See `Files.write`. A file of one chunk is one put."""
        taken = list(chunks)  # its name is known when all are
        path = f"{folder}/{name()}"
        place = self._inside(path)
        with _os_errors():
            self._files.makedirs(self._inside(folder), exist_ok=True)
            try:
                if len(taken) == 1:
                    self._files.pipe_file(place, bytes(taken[0]))
                    return path
                with self._files.open(place, "wb") as file:
                    for chunk in taken:
                        file.write(chunk)
            except BaseException:
                with _whatever_it_says():
                    self._files.rm_file(place)
                raise
        return path

    def read(self, path: str) -> bytes:
        """See `Files.read`."""
        with _os_errors():
            return bytes(self._files.cat_file(self._inside(path)))

    def open(self, path: str, *, size: int) -> NDArray[np.uint8]:
        """See `Files.open`. The copy lies in shared memory, which the preflight checks for room for versions, and goes with the array."""
        place = self._inside(path)
        with _os_errors():
            self._files.invalidate_cache()
            require_size(path, found=int(self._files.info(place)["size"]), size=size)
            if not size:
                return np.empty(0, np.uint8)
            with tempfile.TemporaryFile(dir=shared_place()) as file:
                os.posix_fallocate(file.fileno(), 0, size)  # a full place is an error here, and would be a signal later
                pulled = mmap.mmap(file.fileno(), size)
            for start in range(0, size, PULL_BYTES):
                end = min(start + PULL_BYTES, size)
                block = self._files.cat_file(place, start=start, end=end)
                require_size(f"{path} from {start} to {end}", found=len(block), size=end - start)
                pulled[start:end] = block
        data = np.frombuffer(pulled, np.uint8)
        data.flags.writeable = False
        return data

    def sizes(self, folder: str = "") -> dict[str, int]:
        """See `Files.sizes`."""
        place = self._inside(folder) if folder else self._root
        with _os_errors():
            self._files.invalidate_cache()
            try:
                found = self._files.find(place, detail=True)
            except FileNotFoundError:
                return {}
            start = len(self._root) + 1
            return {path[start:]: int(info["size"]) for path, info in found.items()}

    def remove(self, path: str) -> None:
        """See `Files.remove`."""
        place = self._inside(path)
        with _os_errors():
            try:
                self._files.rm_file(place)
            except FileNotFoundError:
                return

    def remove_folder(self, folder: str) -> None:
        """See `Files.remove_folder`."""
        place = self._inside(folder)
        with _os_errors():
            try:
                self._files.rm(place, recursive=True)
            except FileNotFoundError:
                return

    def _inside(self, path: str) -> str:
        require_inside(path)
        return f"{self._root}/{path}"


@contextmanager
def _os_errors() -> Iterator[None]:
    """Every filesystem has exceptions of its own, which nobody can list: those that are no OSError become one."""
    try:
        yield
    except (OSError, MemoryError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


@contextmanager
def _whatever_it_says() -> Iterator[None]:
    """For removing what is half written: the error that counts is the first."""
    try:
        yield
    except Exception:
        return
