"""Where the console writes: a descriptor of its own, so that no lock of `sys.stdout` is held by a thread that a terminal blocks."""

from __future__ import annotations

import contextlib
import os
import select
from typing import TextIO

from asyncrl.observe.figures import encodable


class Output:
    """Text to a stream, unbuffered. What its encoding lacks is shown in ASCII. Raises OSError or ValueError when the stream is closed."""

    def __init__(self, stream: TextIO | None) -> None:
        self.encoding = getattr(stream, "encoding", None) or "utf-8"
        self._stream = stream
        self._descriptor: int | None = None
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
            self._descriptor = os.dup(stream.fileno())

    def write(self, text: str) -> int:
        """Write all of it; waits for a terminal that does not take it now."""
        shown = encodable(text, self.encoding)
        if self._stream is None:  # closed before we began
            return len(text)
        if self._descriptor is None:
            self._stream.write(shown)
            self._stream.flush()
            return len(text)
        data = shown.encode(self.encoding, "replace")
        while data:
            try:
                data = data[os.write(self._descriptor, data):]
            except BlockingIOError:  # somebody else made the terminal non-blocking
                select.select([], [self._descriptor], [])
        return len(text)

    def line(self, text: str) -> None:
        """Write one line."""
        self.write(text + "\n")

    def flush(self) -> None:
        """Nothing is held back."""

    def isatty(self) -> bool:
        """Whether a person may be looking."""
        try:
            return self._stream.isatty()
        except (ValueError, AttributeError):
            return False

    def close(self) -> None:
        """Give the descriptor back; the stream stays open. Safe to call twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
