"""The first signal is a request to end well; the whole command is tested in tests/loop/test_interrupts.py."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import pytest

from asyncrl.interrupts import Interrupted, run_interruptibly


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_sent_twice_at_once_is_one_request(signum: signal.Signals) -> None:
    """`timeout` signals its command, then the group it is in."""
    said: list[str] = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), signum)
            os.kill(os.getpid(), signum)
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            said.append("ended well")

    with pytest.raises(Interrupted) as end:
        run_interruptibly(work())
    assert end.value.signum == signum
    assert said == ["ended well"]


def test_handlers_are_those_of_before_afterwards() -> None:
    def handlers() -> list[Callable[..., object] | int | None]:
        return [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)]

    async def work() -> None:
        assert handlers() != before

    before = handlers()
    run_interruptibly(work())
    assert handlers() == before


def test_what_work_raises_is_raised() -> None:
    async def work() -> None:
        raise ZeroDivisionError("its own")

    with pytest.raises(ZeroDivisionError, match="its own"):
        run_interruptibly(work())
