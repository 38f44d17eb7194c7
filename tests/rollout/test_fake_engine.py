"""The scripted engine keeps the contract on a virtual clock, and breaks it in just the ways it is told to."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from asyncrl.clock import VirtualLoop, now_s, run_virtual
from asyncrl.errors import AbortNotHonoured, ChildDied, EngineError, WeightSyncError
from asyncrl.paths import RunPaths
from asyncrl.rollout.engine import Chunk, GenerationRequest, Interruption
from asyncrl.rollout.fake_engine import FakeEngine, Faults, counting_policy, fake_manifest
from asyncrl.types import Sampling, Status
from tests.rollout import engine_contract, sleep_contract, start_contract
from tests.rollout.engine_contract import Rig, Written

EOS_TOKENS = frozenset({1, 5})


def random_policy(request: GenerationRequest, index: int, version: int) -> tuple[int, float]:
    place = len(request.tokens) + index
    return random.Random(f"{request.seed} {place}").randint(1, 47), -(1.0 + version) - place / 64


@pytest.fixture(params=[True, False], ids=["recomputes in place", "resubmits"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        engine = FakeEngine(random_policy, eos_tokens=EOS_TOKENS, in_place_recompute=request.param, context_tokens=256)
        engine.faults = Faults(pause_s=0.25)
        prompts = [np.arange(2, 5 + index % 7, dtype=np.int32) for index in range(16)]
        yield Rig(engine, runner.run, lambda version, base: fake_manifest(version, base=base), _truth, EOS_TOKENS, prompts)


@pytest.mark.parametrize("rule", [*engine_contract.RULES, *sleep_contract.RULES], ids=lambda rule: rule.__name__)
def test_contract(rig: Rig, rule) -> None:
    rig.run(rule(rig))


def test_nothing_is_sampled_before_an_anchor() -> None:
    run_virtual(start_contract.an_engine_without_a_version_does_not_sample(FakeEngine()))


def test_started_again_it_is_a_new_engine(rig: Rig, tmp_path: Path) -> None:
    rig.run(start_contract.started_again_it_is_a_new_engine(rig, RunPaths(root=tmp_path, shared=tmp_path)))


@pytest.mark.parametrize(("kind", "fresh"), [(Interruption.KEEP, False), (Interruption.RECOMPUTE, True)])
def test_an_update_after_token_n_starts_a_span_at_n(kind: Interruption, fresh: bool) -> None:
    async def main() -> None:
        engine = await _serving(FakeEngine())
        task = asyncio.create_task(_collect(engine, _request(max_new_tokens=9)))
        await asyncio.sleep(4.5)
        await _update(engine, 4, kind)
        await asyncio.sleep(2)
        await _update(engine, 7, kind)
        chunks = await task
        assert [(c.tokens.tolist(), c.policy_version, c.kv_fresh, c.finish) for c in chunks] == [
            ([5, 6, 7, 8], 0, True, None), ([9, 2], 4, fresh, None), ([3, 4, 5], 7, fresh, Status.LENGTH)]
        assert chunks[1].logprobs.tolist() == [-5 - 4 / 64, -5 - 5 / 64]

    run_virtual(main())


def test_an_abort_that_does_nothing_is_reported() -> None:
    async def main() -> None:
        engine = await _serving(FakeEngine())
        task = asyncio.create_task(_collect(engine, _request(max_new_tokens=5)))
        await asyncio.sleep(1.5)
        engine.faults = Faults(abort_ignored=True)
        with pytest.raises(AbortNotHonoured, match="goes on sampling 1 requests"):
            await engine.pause(Interruption.RECOMPUTE)
        assert sum(len(chunk.tokens) for chunk in await task) == 5

    run_virtual(main())


@pytest.mark.parametrize("broken", [float("nan"), None])
def test_a_scripted_bad_logprob_is_handed_over_as_it_is(broken: float | None) -> None:
    def policy(request: GenerationRequest, index: int, version: int) -> tuple[int, float | None]:
        return 7, broken if index == 1 else -0.5

    async def main() -> None:
        engine = await _serving(FakeEngine(policy))
        (chunk,) = await _collect(engine, _request(max_new_tokens=3))
        assert chunk.logprobs is None if broken is None else np.isnan(chunk.logprobs).tolist() == [False, True, False]

    run_virtual(main())


def test_a_policy_that_raises_answers_its_request_alone() -> None:
    def policy(request: GenerationRequest, index: int, version: int) -> tuple[int, float]:
        if request.request_id == "bad":
            raise EngineError("400: prompt not accepted")
        return counting_policy(request, index, version)

    async def main() -> None:
        engine = await _serving(FakeEngine(policy))
        good = asyncio.create_task(_collect(engine, _request("good", max_new_tokens=3)))
        with pytest.raises(EngineError, match="400: prompt not accepted"):
            await _collect(engine, _request("bad", max_new_tokens=3))
        assert len((await good)[0].tokens) == 3
        assert engine.running_requests == 0

    run_virtual(main())


def test_death_ends_open_requests_and_later_calls() -> None:
    async def main() -> None:
        engine = await _serving(FakeEngine())
        asyncio.get_running_loop().call_at(2.5, engine.die)
        with pytest.raises(ChildDied, match="signal 9"):
            await _collect(engine, _request(max_new_tokens=50))
        assert now_s() == 2.5
        with pytest.raises(ChildDied, match="signal 9"):
            await engine.health()

    run_virtual(main())


def test_a_request_can_hang() -> None:
    async def main() -> None:
        engine = await _serving(FakeEngine())
        engine.faults = Faults(hang_after_tokens=2)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1000):
                await _collect(engine, _request(max_new_tokens=5))
        assert engine.running_requests == 0

    run_virtual(main())


def test_a_failed_apply_leaves_the_version_and_a_wrong_hash_is_told() -> None:
    async def main() -> None:
        engine = await _serving(FakeEngine())
        await engine.pause(Interruption.KEEP)
        engine.faults = Faults(apply_error="disk full")
        with pytest.raises(WeightSyncError, match="disk full"):
            await engine.apply(fake_manifest(1, base=0))
        assert engine.version == 0
        engine.faults = Faults(wrong_hash=True)
        ack = await engine.apply(fake_manifest(1, base=0))
        assert (ack.version, ack.state_hash) == (1, 1002)

    run_virtual(main())


@pytest.mark.parametrize(("stale", "first_logprob"), [(False, -2.0), (True, -1.0)])
def test_a_prefix_cache_that_survives_an_update_serves_the_old_version(stale: bool, first_logprob: float) -> None:
    async def main() -> None:
        engine = await _serving(FakeEngine())
        engine.faults = Faults(stale_prefix_cache=stale)
        await _collect(engine, _request(max_new_tokens=2))
        await _update(engine, 1, Interruption.DRAIN)
        (chunk,) = await _collect(engine, _request(max_new_tokens=2))
        assert chunk.policy_version == 1
        assert chunk.logprobs.tolist() == [first_logprob, -2 - 1 / 64]

    run_virtual(main())


def test_an_offset_shifts_every_logprob_and_a_slow_pause_takes_its_time() -> None:
    async def main() -> None:
        engine = await _serving(FakeEngine())
        engine.faults = Faults(logprob_offset=0.25, pause_s=2.0)
        task = asyncio.create_task(_collect(engine, _request(max_new_tokens=4)))
        await asyncio.sleep(0.5)
        ack = await _update(engine, 1, Interruption.KEEP)
        assert ack.pause_s == 2.0
        first, _ = await task
        assert first.logprobs.tolist() == [-0.75, -0.75 - 1 / 64]

    run_virtual(main())


def test_every_call_is_on_record(tmp_path: Path) -> None:
    async def main() -> None:
        engine = FakeEngine()
        paths, request = RunPaths(tmp_path, tmp_path), _request(max_new_tokens=1)
        await engine.start(paths)
        await _update(engine, 0, Interruption.DRAIN, base=None)
        await _collect(engine, request)
        await engine.close()
        assert [name for name, _ in engine.calls] == ["start", "pause", "apply", "resume", "generate", "close"]
        assert engine.calls[0][1] is paths
        assert engine.calls[4][1] is request

    run_virtual(main())


def _request(request_id: str = "r", **sampling: int) -> GenerationRequest:
    return GenerationRequest(request_id, np.asarray([4, 4, 4], np.int32), Sampling(**sampling), seed=0)


async def _serving(engine: FakeEngine) -> FakeEngine:
    await _update(engine, 0, Interruption.DRAIN, base=None)
    return engine


async def _update(engine: FakeEngine, version: int, kind: Interruption, base: int | None = -1):
    await engine.pause(kind)
    ack = await engine.apply(fake_manifest(version, base=engine.version if base == -1 else base))
    await engine.resume()
    return ack


async def _collect(engine: FakeEngine, request: GenerationRequest) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(request)]


def _truth(written: Written) -> NDArray[np.float32]:
    versions = np.concatenate([np.full(len(chunk.tokens), chunk.policy_version) for chunk in written.chunks])
    places = len(written.prompt) + np.arange(len(written.tokens))
    return (-(1.0 + versions) - places / 64).astype(np.float32)
