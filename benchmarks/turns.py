"""A process that does one thing each time it is asked, and says how long it took and how much memory it held. Needs nothing of asyncrl.

A line on standard input asks for a turn; a line of JSON answers it. Whatever a library prints goes to standard error.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_PR_SET_PDEATHSIG = 1


class Turns:
    """What the parent asks for. Iterate, or call `begin` and `end` where somebody else's loop runs."""

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == 1:
            raise SystemExit("the process that asked is gone")
        self._answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._base_bytes = 0
        self._began_s = 0.0

    def start(self) -> None:
        """What is held from here on counts."""
        self._base_bytes = _status_bytes("VmRSS")

    def ready(self, **values: float) -> None:
        """Tell the parent that turns can be asked for."""
        self._say(values)

    def begin(self) -> None:
        """Wait for a turn; the process ends when there is none left."""
        if not sys.stdin.readline():
            os._exit(0)  # threads that a library has started would hold up any other way out
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the high mark starts anew
        self._began_s = time.perf_counter()

    def end(self, **values: float) -> None:
        """The turn is done."""
        seconds = time.perf_counter() - self._began_s
        self._say({"seconds": seconds, "peak_bytes": _status_bytes("VmHWM") - self._base_bytes, **values})

    def __iter__(self) -> Iterator[None]:
        while True:
            self.begin()
            yield
            self.end()

    def _say(self, values: dict[str, float]) -> None:
        print(json.dumps(values), file=self._answers, flush=True)


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
