"""All ranks of a trainer behind one call: as children, or as the one rank in this process. Needs no torch until that one starts."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from asyncrl.channel import Reply, Request
from asyncrl.child import Child
from asyncrl.errors import ChildDied
from asyncrl.train.rank_spec import RankSpec

SETTLE_S = 2.0
"""After the first failure, how long the other ranks' answers are waited for: a peer's broken connection is often seen before its death."""


class RankGroup(Protocol):
    """The ranks of one trainer."""

    async def call(self, op: str, body: Mapping[str, Any], *, arrays: Mapping[str, NDArray[Any]], timeout_s: float) -> list[Reply]:
        """The same operation on every rank; replies in rank order.

        Raises ChildDied when a rank is gone or silent, else the first rank's error. Ranks that still work by then are killed,
        and all of them when the call is cancelled.
        """

    async def kill(self) -> None:
        """End every rank at once; returns when none is left."""

    async def close(self) -> None:
        """End every rank; safe to call twice."""


class InlineRank:
    """The one rank of a trainer without children."""

    def __init__(self, spec: RankSpec) -> None:
        from asyncrl.train.rank import RankTrainer

        self._rank = RankTrainer(spec)
        self._threads = spec.config.trainer.threads

    async def call(self, op: str, body: Mapping[str, Any], *, arrays: Mapping[str, NDArray[Any]], timeout_s: float) -> list[Reply]:
        """Runs in this thread, to its end."""
        import torch

        torch.set_num_threads(self._threads)  # an engine in this process has a number of its own
        result = self._rank.handlers()[op](Request(op, body=body, arrays=arrays))
        return [result if isinstance(result, Reply) else Reply(result or {})]

    async def kill(self) -> None:
        """Nothing to kill: a rank in this process lives as long as it."""

    async def close(self) -> None:
        """Leaves its process group, if it has one."""
        self._rank.close()


class ChildRanks:
    """Ranks as child processes. `ChildRanks.start` makes them."""

    def __init__(self, children: Sequence[Child]) -> None:
        self._children = tuple(children)

    @classmethod
    async def start(cls, specs: Sequence[RankSpec], *, logs: Path, start_timeout_s: float) -> ChildRanks:
        """All ranks up and connected, or an error and none left."""
        env = {"OMP_NUM_THREADS": str(specs[0].config.trainer.threads), "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        if specs[0].deterministic:
            env["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # without it cuBLAS may use another algorithm every time, and torch refuses it
        starts = [asyncio.create_task(Child.start("asyncrl.train.rank", name=f"trainer-{spec.rank}", spec=spec.to_wire(), logs=logs,
                                                  env=env, start_timeout_s=start_timeout_s)) for spec in specs]
        try:
            return cls(await asyncio.gather(*starts))
        except BaseException:
            for start in starts:
                start.cancel()
            started = await asyncio.gather(*starts, return_exceptions=True)
            await cls([child for child in started if isinstance(child, Child)]).kill()
            raise

    async def call(self, op: str, body: Mapping[str, Any], *, arrays: Mapping[str, NDArray[Any]], timeout_s: float) -> list[Reply]:
        """See `RankGroup`."""
        calls = [asyncio.create_task(child.call(op, body, arrays=arrays, timeout_s=timeout_s)) for child in self._children]
        try:
            await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            if all(call.done() and call.exception() is None for call in calls):
                return [call.result() for call in calls]
            _, working = await asyncio.wait(calls, timeout=SETTLE_S)
            if working:
                await self.kill()
            raise _worst([call.exception() for call in calls if call not in working])
        except asyncio.CancelledError:
            # Ranks that finish what nobody waits for would be ahead of what the caller knows.
            await self.kill()
            raise
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    async def kill(self) -> None:
        """See `RankGroup`."""
        for child in self._children:
            child.kill()
        await asyncio.gather(*(child.wait_exit() for child in self._children))

    async def close(self) -> None:
        """See `RankGroup`."""
        await asyncio.gather(*(child.close() for child in self._children))


async def start_ranks(first: RankSpec, *, logs: Path) -> RankGroup:
    """The ranks of a trainer, by the spec of rank 0: children, or with `trainer.processes` 0 the one in this process.

    Raises ConfigError, ChildDied or TimeoutError, leaving no process.
    """
    settings = first.config.trainer
    if not settings.processes:
        return InlineRank(first)
    specs = [dataclasses.replace(first, rank=rank) for rank in range(settings.processes)]
    return await ChildRanks.start(specs, logs=logs, start_timeout_s=settings.start_timeout_s)


def _worst(errors: Sequence[BaseException | None]) -> BaseException:
    """A death before anything it caused in the others; a rank that never answered counts as dead."""
    found = [error for error in errors if error is not None]
    deaths = [error for error in found if isinstance(error, ChildDied)]
    silent = [ChildDied(str(error)) for error in found if isinstance(error, TimeoutError)]
    return [*deaths, *silent, *found][0]
