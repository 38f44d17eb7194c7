import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from asyncrl.channel import Reply
from asyncrl.train.rank_group import ChildRanks


@dataclass
class SlowChild:
    """Works on a call until told to finish."""

    finish: asyncio.Event = field(default_factory=asyncio.Event)
    called: asyncio.Event = field(default_factory=asyncio.Event)
    killed: bool = False

    async def call(self, *_: Any, **__: Any) -> Reply:
        self.called.set()
        await self.finish.wait()
        return Reply()

    def kill(self) -> None:
        self.killed = True

    async def wait_exit(self) -> str:
        return "killed"


def test_ranks_do_not_finish_what_was_cancelled() -> None:
    """One that did would be a step ahead of what its trainer knows, and be given the same batch again."""
    async def main() -> None:
        done, working = SlowChild(), SlowChild()
        done.finish.set()
        call = asyncio.create_task(ChildRanks([done, working]).call("step", {}, arrays={}, timeout_s=60.0))  # type: ignore[list-item]
        await working.called.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert done.killed
        assert working.killed

    asyncio.run(main())
