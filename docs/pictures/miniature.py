"""A run on a virtual clock: the real buffer, router, worker, session and ledger; a scripted engine, and a trainer that only waits."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from asyncrl.accounting import Ledger, RolloutKey
from asyncrl.buffer.replay_buffer import ReplayBuffer
from asyncrl.clock import now_s
from asyncrl.rollout.engine import Ack, GenerationRequest, Interruption
from asyncrl.rollout.env import Outcome, Session
from asyncrl.rollout.fake_engine import FakeEngine, fake_manifest
from asyncrl.rollout.router import Router
from asyncrl.rollout.worker import RolloutWorker
from asyncrl.types import Batch, Prompt, Sampling
from asyncrl.weights.manifest import Manifest

END = 1
"""The token that ends a rollout."""


@dataclass
class Life:
    """What became of one group, in virtual seconds."""

    admitted: float
    done: float | None = None
    taken: float | None = None
    trained: float | None = None
    freed: float | None = None
    version: int | None = None
    """Its batch trained from."""
    tokens: list[tuple[float, int]] = field(default_factory=list)
    """When each was sampled, and by which version."""


class TimedEngine(FakeEngine):
    """A token a second, and weights that take their time."""

    def __init__(self, policy: Callable[..., tuple[int, float]], *, apply_s: float) -> None:
        super().__init__(policy, name="engine", eos_tokens=frozenset({END}))
        self._apply_s = apply_s

    async def apply(self, manifest: Manifest) -> Ack:
        await asyncio.sleep(self._apply_s)
        return await super().apply(manifest)


@dataclass(frozen=True, slots=True)
class Script:
    """How long each rollout is, what it earns, and how long the trainer and the weights take."""

    tokens: Callable[[RolloutKey], int]
    reward: Callable[[RolloutKey], float]
    step_s: float
    apply_s: float
    until_s: float


class Miniature:
    """The four coroutines of `asyncrl.loop` round the real buffer."""

    def __init__(self, script: Script, **buffer: Any) -> None:
        self.script, self.ledger = script, Ledger()
        self.buffer = ReplayBuffer(ledger=self.ledger, depth_groups="max", **buffer)
        self.router = Router([TimedEngine(self._write, apply_s=script.apply_s)])
        self.worker = RolloutWorker(self.router, self, sampling=Sampling(max_new_tokens=99), ledger=self.ledger, seed=0)
        self.lives: dict[int, Life] = {}
        self.updates: list[tuple[float, float]] = []

    async def run(self, prompt: Prompt, session: Session) -> Outcome:
        """One completion and its reward, as an `Env` has it."""
        turn = await session.generate(prompt.tokens)
        return Outcome(turn.finish, {"total": self.script.reward(session.key)})

    async def play(self) -> Miniature:
        """All of it, up to `until_s`."""
        self.manifests: asyncio.Queue[Manifest] = asyncio.Queue()
        await self.router.update(fake_manifest(0), Interruption.KEEP)
        self.began_s = now_s()
        self.buffer.add_engine("engine", 0)
        try:
            async with asyncio.timeout(self.script.until_s), asyncio.TaskGroup() as tasks:
                for part in (self._feed(tasks), self._train(), self._sync()):
                    tasks.create_task(part)
                await asyncio.sleep(self.script.until_s - 1e-3)
                self.account = self.ledger.check(buffered=self.buffer.held(), in_flight=self.worker.in_flight())
                await asyncio.sleep(1)
        except TimeoutError:
            return self
        raise AssertionError("the coroutines have no end of their own")

    async def _feed(self, tasks: asyncio.TaskGroup) -> None:
        for number in itertools.count():
            prompt = Prompt(tokens=(2,), prompt_id=f"prompt/{number}")
            group_id = (await self.buffer.admit(prompt)).group_id
            self.lives[group_id] = Life(self._now())
            for index in range(self.buffer.config.group_size):
                tasks.create_task(self._roll_out(prompt, group_id, index))

    async def _roll_out(self, prompt: Prompt, group_id: int, index: int) -> None:
        self.buffer.complete(await self.worker.run(prompt, group_id=group_id, index=index))
        self.lives[group_id].done = self._now()

    async def _train(self) -> None:
        while batch := await self.buffer.take():
            self._note(batch, taken=self._now(), version=batch.version)
            await asyncio.sleep(self.script.step_s)
            self.buffer.trained(batch)
            masked = sum(rollout.num_tokens for rollout in batch.rollouts if rollout.status.is_error)
            self.ledger.trained(batch, trained_tokens=sum(group.num_tokens for group in batch.groups) - masked, masked_tokens=masked)
            self._note(batch, trained=self._now())
            self.manifests.put_nowait(fake_manifest(self.buffer.version, base=batch.version))

    async def _sync(self) -> None:
        while True:
            manifest = await self.manifests.get()
            began_s = self._now()
            update = await self.router.update(manifest, Interruption.KEEP)
            self.buffer.acknowledge("engine", update.acks["engine"].version)
            self.updates.append((began_s, self._now()))
            for life in self.lives.values():
                if life.trained is not None and life.freed is None and life.version is not None and life.version < manifest.version:
                    life.freed = self._now()

    def _write(self, request: GenerationRequest, index: int, version: int) -> tuple[int, float]:
        group_id, place, attempt, _ = map(int, request.request_id.split("."))
        self.lives[group_id].tokens.append((self._now(), version))
        return (END if index + 1 == self.script.tokens((group_id, place, attempt)) else 2), -1.0

    def _note(self, batch: Batch, **what: Any) -> None:
        for group in batch.groups:
            for name, value in what.items():
                setattr(self.lives[group.group_id], name, value)

    def _now(self) -> float:
        return round(now_s() - self.began_s, 3)
