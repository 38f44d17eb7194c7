"""The rules of an engine that has just been started: for the first time, or anew."""

from __future__ import annotations

import asyncio

import pytest

from asyncrl.errors import ChildDied, WeightSyncError
from asyncrl.paths import RunPaths
from asyncrl.rollout.engine import Engine
from asyncrl.types import NOT_SAMPLED, Sampling
from tests.rollout.engine_contract import Rig, Written


async def an_engine_without_a_version_does_not_sample(engine: Engine) -> None:
    assert (await engine.health()).version == NOT_SAMPLED
    with pytest.raises(WeightSyncError, match="none has been applied"):
        await engine.resume()


async def started_again_it_is_a_new_engine(rig: Rig, paths: RunPaths) -> None:
    await rig.begin()
    long, short = rig.start_long(Sampling(max_new_tokens=200))
    await short
    await rig.engine.close()
    ends = await asyncio.gather(*long, return_exceptions=True)
    assert any(isinstance(end, ChildDied) for end in ends)
    assert all(isinstance(end, ChildDied | Written) for end in ends)
    await rig.engine.start(paths)
    await an_engine_without_a_version_does_not_sample(rig.engine)
    await rig.begin()
    for written in await rig.write_all([Sampling(max_new_tokens=12)] * len(rig.prompts)):
        rig.check(written)
        assert [version for _, version, _ in written.spans] == [0]
