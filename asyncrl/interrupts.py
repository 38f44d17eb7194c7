"""Ctrl-C and SIGTERM: the first is a request, the second is final."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Coroutine
from types import FrameType
from typing import Any

from asyncrl.paths import remove_shared_folders

_STDERR = 2
_ONE_REQUEST_S = 0.5
"""`timeout` and some schedulers signal the process and then its group: twice is once."""
_ENDING = "ending; a step under way is finished and saved. Once more ends it at once"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):
    """What was run ended because a signal asked it to."""

    def __init__(self, signum: int) -> None:
        self.signum = signum
        super().__init__(f"ended by {signal.Signals(signum).name}")


def run_interruptibly(work: Coroutine[Any, Any, object], *, said: str = _ENDING) -> None:
    """Run `work` in an event loop of its own, in the main thread. Raises Interrupted when a signal ended it.

    The first signal cancels `work`, which may take its time to end well. A second one, after a moment, ends the process at once:
    children die with it, its shared memory is freed, the exit code is 128 + the signal's number. What is `said` at the first is on
    standard error.
    """
    received: list[tuple[int, float]] = []

    async def main() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def on_signal(signum: int, frame: FrameType | None) -> None:
            if received and time.monotonic() - received[0][1] < _ONE_REQUEST_S:
                return
            if received:
                remove_shared_folders()
                os._exit(128 + signum)
            received.append((signum, time.monotonic()))
            # Written past Python's buffers, whose lock the interrupted code may hold; a closed one is nobody's to read.
            with contextlib.suppress(OSError):
                os.write(_STDERR, f"asyncrl: {said}\n".encode())
            loop.call_soon_threadsafe(task.cancel)

        before = {signum: signal.signal(signum, on_signal) for signum in _SIGNALS}
        try:
            await work
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    try:
        asyncio.run(main())
    except asyncio.CancelledError:
        if not received:
            raise
        raise Interrupted(received[0][0]) from None
