"""The rules of engines that sleep, run like those of `engine_contract`."""

from __future__ import annotations

import asyncio

import pytest

from asyncrl.errors import EngineError, WeightSyncError, WrongBase
from asyncrl.rollout.engine import Interruption
from asyncrl.types import NOT_SAMPLED, Sampling
from tests.rollout.engine_contract import Rig, ticks


async def asleep_it_holds_nothing_and_awake_it_samples_only_after_an_anchor(rig: Rig) -> None:
    await rig.begin()
    before = await rig.write_all([Sampling(max_new_tokens=8)] * 4)
    await rig.engine.pause(Interruption.DRAIN)
    slept = await rig.engine.sleep()
    assert slept.freed_bytes > 0
    with pytest.raises(EngineError, match="asleep"):
        await rig.engine.sleep()
    late = asyncio.create_task(rig.write(rig.prompts[0], Sampling(max_new_tokens=8)))
    with pytest.raises(WeightSyncError, match="asleep"):
        await rig.apply(2, None)
    with pytest.raises(WeightSyncError, match="no version"):
        await rig.engine.resume()
    await rig.engine.wake()
    assert (await rig.engine.health()).version == NOT_SAMPLED
    with pytest.raises(WeightSyncError, match="no version"):
        await rig.engine.resume()
    with pytest.raises(EngineError, match="not asleep"):
        await rig.engine.wake()
    with pytest.raises(WrongBase):
        await rig.apply(1, 0)
    await ticks()
    assert not late.done()
    ack = await rig.apply(2, None)
    assert ack.state_hash == rig.manifest(2, None).state_hash
    await rig.engine.resume()
    for written in [*await rig.write_all([Sampling(max_new_tokens=8)] * 4), await late]:
        rig.check(written)
        assert [version for _, version, _ in written.spans] == [2]
    for written in before:
        rig.check(written)


async def an_engine_with_a_request_in_its_cache_does_not_sleep(rig: Rig) -> None:
    await rig.begin()
    with pytest.raises(EngineError, match="paus"):
        await rig.engine.sleep()
    long, short = rig.start_long(Sampling(max_new_tokens=40))
    await short
    await rig.engine.pause(Interruption.KEEP)
    with pytest.raises(EngineError, match=r"request|wave"):
        await rig.engine.sleep()
    await rig.engine.resume()
    for written in await asyncio.gather(*long):
        rig.check(written)


RULES = (asleep_it_holds_nothing_and_awake_it_samples_only_after_an_anchor, an_engine_with_a_request_in_its_cache_does_not_sleep)
"""Every rule of one started engine with the capability."""
