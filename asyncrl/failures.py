"""The first failure of the coroutines of a run, which reaches whoever waits for any of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from asyncrl.rollout.evaluate import first_failure

T = TypeVar("T")


class Failures:
    """Keeps the first failure; made in a running loop. `tell` hears of each one, as it comes."""

    def __init__(self, *, tell: Callable[[BaseException], None]) -> None:
        self._tell = tell
        self._first: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self.unreported: BaseException | None = None
        """The first failure of a watched coroutine, while no call has raised it."""

    def end(self, reason: BaseException) -> None:
        """Whoever waits, now or later, gets `reason`, unless something failed before."""
        if not self._first.done():
            self._first.set_result(reason)

    async def watched(self, part: Coroutine[Any, Any, None]) -> None:
        """`part` to its end; what it fails with is kept instead of raised."""
        try:
            await part
        except Exception as error:
            cause = first_failure(error)
            self._tell(cause)
            if not self._first.done():
                self._first.set_result(cause)
                self.unreported = cause

    async def or_result(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, or the first failure, raised, whichever comes first. Cancelled, it leaves nothing running."""
        task = asyncio.ensure_future(work)
        try:
            if self._first.done():
                raise self._first.result()
            await asyncio.wait({task, self._first}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise self._first.result()
            return task.result()
        except Exception as error:
            if error is self.unreported:
                self.unreported = None
            raise
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
