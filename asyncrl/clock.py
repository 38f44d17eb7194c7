"""Time as the running event loop tells it, and an event loop whose time is virtual.

Everything in the library that waits does so through asyncio, so a test that runs on `VirtualLoop` decides what time it
is: when nothing is ready the loop jumps to the next timer instead of sleeping.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def now_s() -> float:
    """Seconds on the running loop's monotonic clock (virtual on a `VirtualLoop`)."""
    return asyncio.get_running_loop().time()


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that never sleeps: time advances to the next timer when nothing else can run."""

    def __init__(self) -> None:
        super().__init__()
        self._virtual_s = 0.0
        self._real_select = self._selector.select
        self._selector.select = self._select  # type: ignore[method-assign]

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._virtual_s

    def _select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("deadlock on the virtual clock: every task waits and no timer is set")
        if timeout > 0:
            self._virtual_s += timeout
        return self._real_select(0)


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end on a fresh virtual loop. Raises RuntimeError on a deadlock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
