"""The account of one engine, by hand numbers on the virtual clock."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest

from asyncrl.clock import run_virtual
from asyncrl.errors import WeightSyncError
from asyncrl.rollout.engine import Ack, Chunk, GenerationRequest, Interruption, Passes
from asyncrl.rollout.fake_engine import FakeEngine
from asyncrl.rollout.timed_engine import EngineSeconds, TimedEngine
from asyncrl.types import Sampling, Status


class Scripted:
    """Writes one chunk after `seconds`; pausing and applying take as long as they are told to."""

    name = "scripted"
    capabilities = dataclasses.replace(FakeEngine(name="other").capabilities, own_process=True, in_place_recompute=True)
    fails = False

    async def generate(self, request: GenerationRequest):
        await asyncio.sleep(request.seed)
        yield Chunk(np.zeros(30, np.int32), np.zeros(30, np.float32), 0, True, Status.LENGTH, passes=Passes(1.0, 3.0))

    async def pause(self, kind: Interruption) -> None:
        await asyncio.sleep(2)

    async def apply(self, manifest: object) -> Ack:
        await asyncio.sleep(3)
        if self.fails:
            raise WeightSyncError("no")
        return Ack(1, 0, pause_s=3.0, recomputed_tokens=5)

    async def resume(self) -> None:
        await asyncio.sleep(1)


def request(seconds: int, *, tokens: int = 10, is_resubmitted: bool = False) -> GenerationRequest:
    return GenerationRequest("0", np.zeros(tokens, np.int32), Sampling(max_new_tokens=30), seed=seconds, is_resubmitted=is_resubmitted)


async def consume(engine: TimedEngine, asked: GenerationRequest) -> None:
    async for _ in engine.generate(asked):
        pass


def whole(account: EngineSeconds) -> float:
    assert sum(value for name, value in dataclasses.asdict(account).items() if name.endswith("_s")) == 2 * account.whole_s
    return account.whole_s


def test_full_is_work_less_than_half_is_tail_and_none_is_idle() -> None:
    async def main() -> EngineSeconds:
        engine = TimedEngine(Scripted())  # type: ignore[arg-type]
        engine.begin()
        await asyncio.gather(*(consume(engine, request(seconds)) for seconds in (8, 8, 8, 20)))
        await asyncio.sleep(5)
        return engine.take()
    account = run_virtual(main())
    assert account == EngineSeconds(decode_s=6.0, prefill_s=2.0, tail_s=12.0, idle_s=5.0, whole_s=25.0, prefill_tokens=40,
                                    decode_tokens=120)


def test_prefill_is_split_by_what_was_read_before() -> None:
    async def main() -> EngineSeconds:
        engine = TimedEngine(Scripted())  # type: ignore[arg-type]
        engine.begin()
        await asyncio.gather(consume(engine, request(8)), consume(engine, request(8, tokens=30, is_resubmitted=True)))
        return engine.take()
    account = run_virtual(main())
    assert (account.decode_s, account.prefill_s, account.reprefill_s) == (6.0, 0.5, 1.5)


def test_a_pause_counts_from_the_last_token_to_the_resume_and_a_failure_until_one_succeeds() -> None:
    async def main() -> tuple[EngineSeconds, EngineSeconds]:
        inner = Scripted()
        engine = TimedEngine(inner)  # type: ignore[arg-type]
        engine.begin()
        await engine.pause(Interruption.KEEP)
        await engine.apply(None)  # type: ignore[arg-type]
        await engine.resume()
        first = engine.take()
        inner.fails = True
        await engine.pause(Interruption.KEEP)
        with pytest.raises(WeightSyncError):
            await engine.apply(None)  # type: ignore[arg-type]
        await asyncio.sleep(7)
        await engine.resume()
        await asyncio.sleep(1)
        return first, engine.take()
    first, second = run_virtual(main())
    assert (first.idle_s, first.paused_s, first.down_s, first.reprefill_tokens) == (2.0, 4.0, 0.0, 5)
    assert (second.idle_s, second.paused_s, second.down_s) == (3.0, 3.0, 8.0)


def test_an_evaluation_is_apart_and_neither_fills_the_engine_nor_counts_its_tokens() -> None:
    async def main() -> EngineSeconds:
        engine = TimedEngine(Scripted())  # type: ignore[arg-type]
        engine.begin()
        engine.aside(True)
        await asyncio.gather(*(consume(engine, request(4)) for _ in range(10)))
        engine.aside(False)
        await consume(engine, request(8))
        return engine.take()
    account = run_virtual(main())
    assert (account.evaluation_s, account.tail_s, account.decode_s + account.prefill_s) == (4.0, 0.0, 8.0)
    assert (account.prefill_tokens, account.decode_tokens, whole(account)) == (10, 30, 12.0)
