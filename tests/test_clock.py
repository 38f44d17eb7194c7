import asyncio
import time

import pytest

from asyncrl.clock import now_s, run_virtual


def test_virtual_time_jumps_to_the_next_timer():
    async def main():
        order = []

        async def after(delay_s, name):
            await asyncio.sleep(delay_s)
            order.append((name, now_s()))

        await asyncio.gather(after(3600.0, "late"), after(60.0, "early"))
        return order

    began = time.monotonic()
    assert run_virtual(main()) == [("early", 60.0), ("late", 3600.0)]
    assert time.monotonic() - began < 60.0


def test_a_time_out_is_virtual_too():
    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(100.0):
                await asyncio.Event().wait()
        return now_s()

    assert run_virtual(main()) == 100.0


def test_a_deadlock_is_an_error_instead_of_a_hang():
    async def main():
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="deadlock on the virtual clock"):
        run_virtual(main())
