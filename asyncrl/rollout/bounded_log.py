"""A log that other processes write through a pipe, and that never takes more than its share of the disk."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_MAX_BYTES = 8 * 2**20
"""Thousands of tracebacks; a reward that prints without end costs the disk twice this."""
_READ_BYTES = 64 * 1024
_DRAIN_READS = 16
"""At the end: what a pipe can hold, no more, for somebody may still write."""


class BoundedLog:
    """The reading end of a pipe, written to `path`; a full file becomes `NAME.1`, so that the newest output is kept.

    `attach` also makes the file this process's own standard output and error. What the disk has no room for is lost.
    """

    def __init__(self, path: Path, *, max_bytes: int = _MAX_BYTES) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._size = 0
        self.reader = self.writer = -1

    def attach(self) -> None:
        """Open the file as descriptors 1 and 2."""
        output = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._size = os.fstat(output).st_size
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        os.close(output)

    def open_pipe(self) -> None:
        """Make the pipe; `writer` is for the other processes."""
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)

    def attach_writer(self) -> None:
        """In another process: the pipe as descriptors 1 and 2."""
        for descriptor in (1, 2):
            os.dup2(self.writer, descriptor)
        os.close(self.writer)
        os.close(self.reader)

    def pump(self) -> bool:
        """Move some of what has come to the file; False when nothing had."""
        try:
            data = os.read(self.reader, _READ_BYTES)
        except BlockingIOError:
            return False
        with contextlib.suppress(OSError):
            if self._size + len(data) > self._max_bytes:
                self._path.replace(self._path.with_name(f"{self._path.name}.1"))
                self.attach()
            self._size += os.write(1, data)
        return True

    def drain(self) -> None:
        """Move the rest, when those who write have ended."""
        for _ in range(_DRAIN_READS):
            if not self.pump():
                return
