"""Engines that fail at any step of an update, die, or come late: each ends serving the newest version, or is given up with its reasons."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.accounting import Ledger
from asyncrl.buffer.replay_buffer import ReplayBuffer
from asyncrl.buffer.view import Slot
from asyncrl.clock import now_s, run_virtual
from asyncrl.errors import ConfigError, RunAborted
from asyncrl.paths import RunPaths
from asyncrl.rollout.evaluate import first_failure
from asyncrl.rollout.fake_engine import FakeEngine, Faults, fake_manifest
from asyncrl.rollout.router import Router
from asyncrl.sync import WeightSync
from asyncrl.types import NOT_SAMPLED, Prompt
from asyncrl.weights.config import WeightsConfig
from asyncrl.weights.manifest import Manifest
from tests.rollout.rollout_fakes import requests_of, worker_of

NO_PATHS = RunPaths(root=Path("/nowhere"), shared=Path("/nowhere"))
FAILURES = {
    "fetch refused": Faults(fetch_error="checksum of part 3 differs"), "fetch hangs": Faults(fetch_s=1e9),
    "fetch dies": Faults(dies_in="fetch"), "pause ignored": Faults(abort_ignored=True), "pause hangs": Faults(pause_s=1e9),
    "pause dies": Faults(dies_in="pause"), "apply refused": Faults(apply_error="checksum of part 3 differs"),
    "apply hangs": Faults(apply_s=1e9), "apply dies": Faults(dies_in="apply"), "hash is another": Faults(wrong_hash=True),
    "resume refused": Faults(resume_error="no"), "resume hangs": Faults(resume_s=1e9), "resume dies": Faults(dies_in="resume"),
}


class Publishing:
    """A trainer that publishes its version: an anchor, then deltas, and the newest whole when asked to."""

    predicted_density = None

    def __init__(self) -> None:
        self.version, self.anchors = 0, 0
        self.retained: int | None = 0

    async def publish(self) -> Manifest:
        return fake_manifest(self.version, base=self.version - 1 if self.version else None)

    async def anchor(self) -> Manifest:
        self.anchors += 1
        return fake_manifest(self.version)

    async def deliver(self, manifest: Manifest, engines: tuple[str, ...]) -> None:
        """Engines have it."""

    async def keep(self, version: int) -> None:
        """It will not be taken back."""

    def retain(self, slowest: int | None) -> None:
        self.retained = slowest


class World:
    """A run in miniature on virtual time: real buffer, router, worker, sync and healing; scripted engines; a trainer that only counts."""

    def __init__(self, *engines: FakeEngine, max_staleness: int = 1, **config: Any) -> None:
        self.trainer, self.ledger = Publishing(), Ledger()
        self.buffer = ReplayBuffer(groups_per_step=2, group_size=2, max_staleness=max_staleness, zero_variance="keep",
                                   stall_timeout_s=1e6, ledger=self.ledger)
        self.router = Router(engines, config=WeightsConfig(**config))
        self.sync = WeightSync(self.trainer, self.router, self.buffer, self.router.config)  # type: ignore[arg-type]
        self.worker = worker_of(self.router, ledger=self.ledger)
        self.max_staleness, self.staleness, self.served_by = max_staleness, Counter[int](), Counter[str]()
        self._engines, self._tasks = engines, set[asyncio.Task[None]]()
        self._trained = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[World]:
        """Engines hold version 0, and everything goes on beside the body. The first failure of any part ends it, and is raised."""
        for engine in self._engines:
            await engine.start(NO_PATHS)
            self.buffer.add_engine(engine.name, 0)
        await self.sync.start()
        try:
            async with asyncio.TaskGroup() as group:
                for part in (self._feed(group), self._train(), self._sync(), self.sync.healing.run(NO_PATHS)):
                    self._keep(group.create_task(part))
                yield self
                for task in self._tasks:
                    task.cancel()
        except BaseExceptionGroup as failures:
            raise first_failure(failures) from None

    async def steps(self, count: int) -> None:
        """Waits for: so many more versions."""
        last = self.trainer.version + count
        async with self._trained:
            await self._trained.wait_for(lambda: self.trainer.version >= last)

    async def settled(self, engine: FakeEngine) -> None:
        """Waits for: an engine that serves, or is given up."""
        await self.router.until(lambda: engine.name in self.router.serving or self.router.is_given_up(engine.name))

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _feed(self, group: asyncio.TaskGroup) -> None:
        for number in itertools.count():
            slot = await self.buffer.admit(Prompt(tokens=(3, 4), prompt_id=str(number)))
            for index in range(2):
                self._keep(group.create_task(self._roll_out(slot, index)))

    async def _roll_out(self, slot: Slot, index: int) -> None:
        self.buffer.complete(await self.worker.run(slot.prompt, group_id=slot.group_id, index=index))

    async def _train(self) -> None:
        while batch := await self.buffer.take():
            self.ledger.check(buffered=self.buffer.held(), in_flight=self.worker.in_flight())
            trained_tokens = 0
            for sequence in (sequence for rollout in batch.rollouts for sequence in rollout.sequences):
                sampled = sequence.policy_versions[sequence.policy_versions != NOT_SAMPLED]
                self.staleness.update((batch.version - sampled).tolist())
                trained_tokens += len(sampled)
            self.buffer.trained(batch)
            self.ledger.trained(batch, trained_tokens=trained_tokens, masked_tokens=0)
            self.trainer.version += 1
            await self.sync.publish()
            async with self._trained:
                self._trained.notify_all()

    async def _sync(self) -> None:
        while True:
            await self.sync.apply_next()


def engine(name: str) -> FakeEngine:
    return FakeEngine(name=name, catches_up=True)


@pytest.mark.parametrize("failure", FAILURES)
def test_an_engine_that_fails_once_at_any_step_serves_again_with_the_newest_version(failure: str) -> None:
    async def main() -> None:
        a, b = engine("a"), engine("b")
        async with World(a, b).running() as world:
            await world.steps(2)
            a.faults = FAILURES[failure]
            await world.router.until(lambda: "a" not in world.router.unfenced)
            assert world.router.serving == ("b",), world.router.reasons
            known, version = len(a.calls), a.version
            a.faults = Faults()
            await world.steps(1)
            await world.settled(a)
            assert world.router.serving == ("a", "b")
            names = [name for name, _ in a.calls[known:]]
            assert ("start" in names) == failure.endswith(("hangs", "dies", "ignored"))
            assert "generate" not in names[:names.index("resume")]
            await world.steps(4)
            assert a.version > version
            assert len(requests_of(a)) > 4
            assert max(world.staleness) <= world.max_staleness
    run_virtual(main())


@pytest.mark.parametrize("failure", FAILURES)
def test_an_engine_that_always_fails_is_given_up_and_the_other_goes_on(failure: str) -> None:
    async def main() -> None:
        a, b = engine("a"), engine("b")
        async with World(a, b, engine_restarts=2).running() as world:
            await world.steps(2)
            a.faults = FAILURES[failure]
            await world.router.until(lambda: world.router.is_given_up("a"))
            names = [name for name, _ in a.calls]
            assert (names.count("start"), names[-1]) == (3, "close")
            assert world.router.serving == ("b",)
            await world.steps(3)
            metrics = world.sync.take_metrics().result()
            assert metrics["weights/engine_restarts/sum"] == 2
            assert metrics["weights/fenced_engines/sum"] == 1
    run_virtual(main())


@pytest.mark.parametrize("failure", FAILURES)
def test_the_last_engine_is_brought_back_too_and_no_rollout_is_lost(failure: str) -> None:
    async def main() -> None:
        a = engine("a")
        async with World(a).running() as world:
            await world.steps(2)
            a.faults = FAILURES[failure]
            await world.router.until(lambda: not world.router.serving)
            a.faults = Faults()
            await world.steps(4)
            assert max(world.staleness) <= world.max_staleness
            assert world.ledger.check(buffered=world.buffer.held(), in_flight=world.worker.in_flight()).is_closed
    run_virtual(main())


def test_a_run_ends_with_every_reason_once_its_last_engine_has_used_up_its_restarts() -> None:
    async def main() -> None:
        async with World(a).running() as world:
            await world.steps(2)
            a.faults = Faults(start_error="no memory")
            died.append(now_s())
            a.die()
            await world.steps(1000)

    async def ended() -> None:
        with pytest.raises(RunAborted, match=r"no engine serves.*signal 9.*no memory.*no memory.*no memory"):
            await main()
        assert [name for name, _ in a.calls].count("start") == 1 + 3
        assert now_s() - died[0] >= 1 + 2 + 4

    a, died = engine("a"), list[float]()
    run_virtual(ended())


def test_restarts_are_counted_anew_after_an_update_the_engine_took_part_in() -> None:
    async def main() -> None:
        a, b = engine("a"), engine("b")
        async with World(a, b, engine_restarts=1).running() as world:
            for _ in range(4):
                await world.steps(2)
                a.die()
                await world.steps(2)
                await world.settled(a)
            assert "a" in world.router.serving
    run_virtual(main())


def test_an_engine_that_comes_late_gets_no_request_before_the_newest_version() -> None:
    async def main() -> None:
        a, late = engine("a"), engine("late")
        async with World(a).running() as world:
            await world.steps(3)
            await late.start(NO_PATHS)
            world.buffer.add_engine("late", NOT_SAMPLED)
            world.router.add(late)
            assert world.router.serving == ("a",)
            await world.settled(late)
            assert late.version == world.trainer.version
            names = [name for name, _ in late.calls]
            assert "generate" not in names[:names.index("resume")]
            await world.steps(3)
            assert requests_of(late)
            assert world.trainer.anchors == 1, "a delta had no base"
            assert max(world.staleness) <= world.max_staleness
    run_virtual(main())


def test_a_name_is_given_to_one_engine_alone() -> None:
    async def main() -> None:
        router = Router([engine("a")])
        with pytest.raises(ConfigError, match=r"engine\.name.*'a'"):
            router.add(engine("a"))
    run_virtual(main())


def test_nothing_an_engine_needs_is_let_go_while_it_is_brought_back() -> None:
    async def main() -> None:
        a, b = engine("a"), engine("b")
        async with World(a, b).running() as world:
            await world.steps(2)
            a.faults = Faults(apply_error="disk full")
            await world.router.until(lambda: "a" not in world.router.unfenced)
            a.faults = Faults(fetch_s=25.0)
            held = a.version
            await world.steps(3)
            assert world.trainer.retained == held
            a.faults = Faults()
            await world.settled(a)
            await world.steps(4)
            assert world.trainer.retained is not None
            assert world.trainer.retained > held
    run_virtual(main())


def test_where_versions_are_pushed_a_fenced_engine_is_given_up_and_a_late_one_refused() -> None:
    async def main() -> None:
        a, b = engine("a"), engine("b")
        async with World(a, b, transport={"kind": "nccl"}).running() as world:
            await world.steps(2)
            a.faults = Faults(apply_error="a bit flipped")
            await world.router.until(lambda: world.router.is_given_up("a"))
            assert (a.calls[-1][0], world.router.serving) == ("close", ("b",))
            await world.steps(2)
            with pytest.raises(ConfigError, match=r"weights\.transport\.kind"):
                world.sync.require_late_joiners()
    run_virtual(main())


@given(seed=st.integers(0, 2**32), max_staleness=st.integers(0, 3), engines=st.integers(1, 3))
def test_the_staleness_bound_and_the_account_hold_whatever_fails(seed: int, max_staleness: int, engines: int) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        fleet = [engine(f"e{number}") for number in range(engines)]
        kinds = list(FAILURES.values())
        async with World(*fleet, max_staleness=max_staleness, engine_restarts=100, apply_timeout_s=20.0, fetch_timeout_s=30.0,
                         interruption=rng.choice(["keep", "recompute", "drain"])).running() as world:
            for _ in range(12):
                await asyncio.sleep(rng.uniform(0, 12))
                victim = rng.choice(fleet)
                if rng.random() < 0.3:
                    victim.die()
                else:
                    victim.faults = rng.choice([*kinds, Faults(fetch_s=rng.uniform(0, 20), pause_s=rng.uniform(0, 5))])
                if rng.random() < 0.2 and len(fleet) < 5:
                    fleet.append(engine(f"e{len(fleet)}"))
                    await fleet[-1].start(NO_PATHS)
                    world.buffer.add_engine(fleet[-1].name, NOT_SAMPLED)
                    world.router.add(fleet[-1])
                await asyncio.sleep(rng.uniform(0, 20))
                victim.faults = Faults()
            await world.steps(3)
            for one in fleet:
                await world.settled(one)
            assert len(world.router.serving) == len(fleet)
            assert max(world.staleness) <= max_staleness
    run_virtual(main())
