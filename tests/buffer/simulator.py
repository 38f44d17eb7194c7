"""A run in miniature: the real buffer and policy, with engines, rollouts and a trainer that act in any order."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from asyncrl.accounting import Ledger, RolloutKey
from asyncrl.buffer.replay_buffer import ReplayBuffer
from asyncrl.types import Batch, Prompt, Status
from tests.buffer.buffer_fakes import rollout, settle


@dataclass
class SimEngine:
    """`version` is what it samples with; the buffer hears of it later."""

    version: int
    alive: bool = True


@dataclass
class Running:
    """A rollout that is being written."""

    engine: str | None
    spans: list[tuple[int, int]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.spans)


class Simulator:
    """Every action keeps the ledger closed; every batch is checked without the library's own checks."""

    def __init__(self, rng: random.Random, *, engines: int, publish_every_steps: int, start_version: int = 0, **settings: Any) -> None:
        self.rng, self.k = rng, publish_every_steps
        self.ledger = Ledger()
        patience = {} if settings.get("zero_variance") == "keep" else {"max_empty_fills": 10**6}
        self.buffer = ReplayBuffer(ledger=self.ledger, publish_every_steps=publish_every_steps, version=start_version,
                                   stall_timeout_s=1e6, **patience, **settings)
        self.config = self.buffer.config
        self.published = start_version
        self.engines = {f"e{n}": SimEngine(start_version) for n in range(engines)}
        for name in self.engines:
            self.buffer.add_engine(name, start_version)
        self.running: dict[RolloutKey, Running] = {}
        self.batch: Batch | None = None
        self.admitting: asyncio.Future[Any] | None = None
        self.taking: asyncio.Future[Any] | None = None
        self.trained: list[int] = []
        self.staleness: Counter[int] = Counter()
        self.calm = rng.random() < 0.5
        """Nothing fails and nothing is dropped."""
        self.held_back = rng.choice([0, 0, 1, 1, 3])
        """The oldest so many groups end only when nothing else runs: what strains a window most."""
        self.weights = {name: rng.choice([1, 4, 16]) for name in self._actions()}

    def _actions(self) -> dict[str, Any]:
        named = (self.sample, self.finish, self.finish_group, self.train, self.publish, self.apply, self.acknowledge, self.drop,
                 self.fence, self.restart, self.join)
        return {action.__name__: action for action in named}

    async def run(self, actions: int) -> None:
        """Random actions."""
        rare = dict.fromkeys(("drop", "fence", "join"), 0.0) if self.calm else {"drop": 0.3, "fence": 0.3, "join": 0.1}
        named = self._actions()
        odds = [self.weights[name] * rare.get(name, 1.0) for name in named]
        for name in self.rng.choices(list(named), odds, k=actions):
            named[name]()
            await self.advance()

    async def drain(self, rounds: int) -> int:
        """Everybody does their part; returns how many steps were trained."""
        before = len(self.trained)
        for _ in range(rounds):
            while self.running:
                self.finish_group()
                await self.advance()
            self.train()
            self.publish()
            for name, engine in self.engines.items():
                if not engine.alive and (self.rng.random() < 0.3 or not any(e.alive for e in self.engines.values())):
                    self._restart(name)
                if not engine.alive:
                    continue
                engine.version = self.published
                self.buffer.acknowledge(name, self.published)
            await self.advance()
        return len(self.trained) - before

    async def strain(self, rounds: int) -> None:
        """What ages a token most: the group admitted last has its tokens early, and ends only when nothing else can happen."""
        for _ in range(rounds):
            for key in self.running:
                self.sample(key)
            victim = max((key[0] for key in self.running), default=-1)
            others = 0
            while await self._everybody_but(victim) and victim >= 0:
                others += 1
                assert others < 100, f"group {victim} is overtaken without end"
            for key in [key for key in sorted(self.running) if key[0] == victim]:
                self.finish(key, reward=float(key[1]))
            await self.advance()

    async def _everybody_but(self, victim: int) -> bool:
        """Every other group ends, every batch is trained, every engine follows; whether anything was left to do."""
        trained, others = len(self.trained), sorted(key for key in self.running if key[0] != victim)
        for key in others:
            self.finish(key, reward=float(key[1]))
        await self.advance()
        self.train()
        self.publish()
        for name, engine in self.engines.items():
            engine.version = self.published
            self.buffer.acknowledge(name, self.published)
        await self.advance()
        return bool(others) or len(self.trained) > trained

    async def close(self) -> None:
        """End the two waits."""
        for waiter in (self.admitting, self.taking):
            if waiter:
                waiter.cancel()
                await asyncio.gather(waiter, return_exceptions=True)

    async def advance(self) -> None:
        """Start what was admitted, receive what was taken, check the ledger."""
        await settle()
        while self.admitting is None or self.admitting.done():
            if self.admitting:
                self._start(self.admitting.result().group_id)
            self.admitting = asyncio.ensure_future(self.buffer.admit(Prompt()))
            await settle()
        if self.taking and self.taking.done():
            self.batch, self.taking = self.taking.result(), None
            self._check(self.batch)
        if self.batch is None and self.taking is None:
            self.taking = asyncio.ensure_future(self.buffer.take())
        in_flight = (sum(r.tokens for r in self.running.values()), len(self.running))
        self.ledger.check(buffered=self.buffer.held(), in_flight=in_flight)

    def _start(self, group_id: int) -> None:
        for index in range(self.config.group_size):
            self.running[group_id, index, 0] = Running(self._serving_engine())
            self.ledger.generated((group_id, index, 0), 0)
            if self.rng.random() < 0.5:
                self.sample((group_id, index, 0))

    def _serving_engine(self) -> str | None:
        return self.rng.choice([e.name for e in self.buffer.view().engines if e.serving] or [None])

    def _check(self, batch: Batch) -> None:
        assert batch.version == self.buffer.version
        assert len(batch.groups) == self.config.groups_per_step
        ids = [group.group_id for group in batch.groups]
        assert ids == sorted(ids)
        assert not set(ids) & set(self.trained)
        for group in batch.groups:
            assert [(r.group_id, r.index) for r in group.rollouts] == [(group.group_id, n) for n in range(self.config.group_size)]
        for one in batch.rollouts:
            for version in one.sequences[0].policy_versions[2:]:
                self.staleness[batch.version - int(version)] += 1

    def _pick(self) -> RolloutKey | None:
        groups = sorted({key[0] for key in self.running})
        late = groups[:self.held_back]
        keys = sorted(key for key in self.running if key[0] not in late) or sorted(self.running)
        return self.rng.choice(keys) if keys else None

    def sample(self, key: RolloutKey | None = None) -> None:
        """Some running rollout gets tokens from its engine."""
        key = key or self._pick()
        if key is None:
            return
        running = self.running[key]
        running.engine = running.engine or self._serving_engine()
        if running.engine:
            tokens = self.rng.randint(1, 3)
            running.spans.append((self.engines[running.engine].version, tokens))
            self.ledger.generated(key, tokens)

    def finish(self, key: RolloutKey | None = None, *, reward: float | None = None) -> None:
        """Some running rollout ends: well, badly, or without being heard of."""
        key = key or self._pick()
        if key is None:
            return
        running = self.running.pop(key)
        fate = self.rng.random() if reward is None and not self.calm else 1.0
        if fate < 0.03:
            self.ledger.abandoned(key, "worker_lost")
            self.buffer.drop(key[0], "worker_lost")
            return
        status = Status.ENGINE_ERROR if fate < 0.1 else Status.STOP
        reward = float(self.rng.randint(0, 1)) if reward is None else reward
        self.buffer.complete(rollout(key[0], key[1], *running.spans, reward=reward, status=status))

    def finish_group(self) -> None:
        """All rollouts of some group end with different rewards."""
        picked = self._pick()
        for key in [key for key in sorted(self.running) if picked and key[0] == picked[0]]:
            self.finish(key, reward=float(key[1]))

    def train(self) -> None:
        """A step on the batch that was taken; a publish that is due comes first, as in the loop."""
        if self.batch is None or (self._due() and self.rng.random() < 0.5):
            return
        batch, self.batch = self.batch, None
        self.buffer.trained(batch)
        masked = sum(r.num_tokens for r in batch.rollouts if r.status.is_error)
        self.ledger.trained(batch, trained_tokens=sum(r.num_tokens for r in batch.rollouts) - masked, masked_tokens=masked)
        self.trained += [group.group_id for group in batch.groups]

    def _due(self) -> bool:
        return self.buffer.version - self.published >= self.k

    def publish(self) -> None:
        """The newest version becomes available to engines."""
        if self._due():
            self.published = self.buffer.version - self.buffer.version % self.k

    def apply(self) -> None:
        """Some engine applies the newest version, unheard."""
        engine = self.rng.choice(list(self.engines.values()))
        if engine.alive:
            engine.version = self.published

    def acknowledge(self) -> None:
        """Some engine says what it holds."""
        name = self.rng.choice(list(self.engines))
        if self.engines[name].alive:
            self.buffer.acknowledge(name, self.engines[name].version)

    def drop(self) -> None:
        """Some group is given up while its rollouts run on."""
        key = self._pick()
        if key:
            self.buffer.drop(key[0], "cancelled")

    def fence(self) -> None:
        """Some engine dies; its rollouts wait for another one, or are lost."""
        name = self.rng.choice(list(self.engines))
        self.buffer.fence(name)
        self.engines[name].alive = False
        for key, running in list(self.running.items()):
            if running.engine == name:
                running.engine = None
                if self.rng.random() < 0.2:
                    del self.running[key]
                    self.ledger.abandoned(key, "engine_died")
                    self.buffer.drop(key[0], "engine_died")

    def restart(self) -> None:
        """A dead engine comes back, with the newest weights or older ones."""
        dead = [name for name, engine in self.engines.items() if not engine.alive]
        if dead:
            self._restart(self.rng.choice(dead))

    def _restart(self, name: str) -> None:
        engine = self.engines[name]
        engine.alive, engine.version = True, self.rng.choice([self.published, max(0, self.published - self.k)])
        self.buffer.add_engine(name, engine.version)

    def join(self) -> None:
        """A new engine, with the newest weights or older ones."""
        if len(self.engines) < 4:
            name = f"e{len(self.engines)}"
            self.engines[name] = SimEngine(self.rng.choice([self.published, max(0, self.published - self.k)]))
            self.buffer.add_engine(name, self.engines[name].version)
