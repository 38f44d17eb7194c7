"""Brings engines back that were fenced, and brings up those that come late: each by itself, beside the run.

    fenced ──▶ it answers? ──yes──▶ newest version, or else an anchor ──▶ acknowledged ──▶ serves
                    │ no                        │ failed
                    └──▶ a new process ◀────────┘     at most `weights.engine_restarts` in a row, later each time

An engine gets no request before it has acknowledged the newest version, and holds no slot of the buffer back.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable

from asyncrl.buffer.replay_buffer import ReplayBuffer
from asyncrl.errors import AsyncRLError, RunAborted, WeightSyncError
from asyncrl.metrics import Metrics
from asyncrl.paths import RunPaths
from asyncrl.rollout.engine import Interruption
from asyncrl.rollout.router import Router
from asyncrl.train.trainer import Trainer
from asyncrl.weights.config import WeightsConfig
from asyncrl.weights.manifest import Manifest

_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0
"""Before a restart; doubled for each one in a row: what killed an engine, as a lack of memory does, may take a while to pass."""


class Healing:
    """What becomes of fenced engines. `run` is one coroutine of the run.

    Where versions are pushed none can be had a second time, so that a fenced engine is given up.
    """

    def __init__(self, router: Router, trainer: Trainer, buffer: ReplayBuffer, config: WeightsConfig) -> None:
        self._router, self._trainer, self._buffer = router, trainer, buffer
        self._is_pushed, self._most_restarts = config.transport.kind == "nccl", config.engine_restarts
        self._interruption = Interruption(config.interruption)
        self._restarts: Counter[str] = Counter()
        self._reading_anchors: set[str] = set()
        self._metrics = Metrics()

    @property
    def reads_anchors(self) -> bool:
        """Whether an engine reads what may be deleted as soon as all others have passed it."""
        return bool(self._reading_anchors)

    def take_metrics(self) -> Metrics:
        """What was measured since the last call."""
        taken, self._metrics = self._metrics, Metrics()
        return taken

    def updated(self, names: Iterable[str]) -> None:
        """Engines took part in an update: their restarts count anew."""
        for name in names:
            self._restarts.pop(name, None)

    async def run(self, paths: RunPaths) -> None:
        """Consumes fenced engines, produces acknowledgements. Waits for: an engine that is fenced. On close: cancelled.

        Raises RunAborted, with every reason, when no engine serves and none can come back.
        """
        async with asyncio.TaskGroup() as tasks:
            while True:
                name = await self._router.next_fenced()
                self._buffer.fence(name)
                self._metrics.sum("weights/fenced_engines/sum", 1)
                tasks.create_task(self._bring_back(name, paths), name=f"healing of {name}")

    async def _bring_back(self, name: str, paths: RunPaths) -> None:
        """Refill the engine as it is, then in new processes, until it serves or has used up its restarts."""
        if self._is_pushed:
            await self._router.give_up(name)
            return
        while True:
            if not self._router.answers(name):
                if self._restarts[name] >= self._most_restarts:
                    await self._router.give_up(name)
                    return
                await asyncio.sleep(min(_FIRST_WAIT_S * 2 ** self._restarts[name], _LONGEST_WAIT_S))
            await self._router.until(lambda: not self._router.is_resting)
            try:
                with self._router.attempt():
                    if not self._router.answers(name):
                        self._restarts[name] += 1
                        self._metrics.sum("weights/engine_restarts/sum", 1)
                        await self._router.start_anew(name, paths)
                    await self._refill(name)
                return
            except RunAborted:
                raise
            except (AsyncRLError, TimeoutError) as error:
                self._router.not_brought_back(name, error)
            finally:
                self._reading_anchors.discard(name)

    async def _refill(self, name: str) -> None:
        """Newest version, newer ones that come meanwhile, and an anchor where nothing else leads there; then it serves."""
        manifest, is_anchor = self._newest(), False
        while True:
            try:
                ack = await self._router.bring_to(name, manifest, self._interruption)
            except WeightSyncError:
                if is_anchor:
                    raise
                self._reading_anchors.add(name)
                manifest, is_anchor = await self._trainer.anchor(), True
                continue
            if self._router.join(name, manifest):
                self._buffer.acknowledge(name, ack.version)
                return
            manifest, is_anchor = self._newest(), False

    def _newest(self) -> Manifest:
        assert self._router.newest is not None, "a run begins with a version"
        return self._router.newest
