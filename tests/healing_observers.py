"""What a configuration leads to when engines are slow or do not come back, on virtual time."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from asyncrl import training
from asyncrl.buffer.replay_buffer import ReplayBuffer
from asyncrl.clock import now_s, run_virtual
from asyncrl.config import RunConfig
from asyncrl.errors import RunAborted
from asyncrl.healing import Healing
from asyncrl.paths import RunPaths
from asyncrl.rollout import env
from asyncrl.rollout.engine import Interruption
from asyncrl.rollout.fake_engine import FakeEngine, Faults, fake_manifest
from asyncrl.rollout.router import Router
from tests.config_observers import Scene
from tests.test_sync import Publishing


def patience(config: RunConfig, scene: Scene) -> object:
    """How long an engine that never pauses, and one that never applies, is waited for before it is fenced."""
    scene.patch.setattr(env, "RewardPool", lambda functions, **settings: None)
    limits = training.build(config, model=scene.model).router.config

    async def main() -> object:
        waits = []
        for stuck, kind in (("pause", Interruption.DRAIN), ("pause", Interruption.KEEP), ("apply", Interruption.KEEP),
                            ("fetch", Interruption.KEEP)):
            engine, began_s = FakeEngine(), now_s()
            setattr(engine, stuck, lambda *_: asyncio.sleep(1e9))
            router = Router([engine], config=limits)
            with contextlib.suppress(RunAborted):
                await router.fetch(fake_manifest(0))
                await router.update(fake_manifest(0), kind)
            waits.append(now_s() - began_s)
        return waits

    return run_virtual(main())


def restarts(config: RunConfig, scene: Scene) -> object:
    """How often an engine that never starts again is started anew before the run ends."""
    async def main() -> object:
        engine = FakeEngine()
        router = Router([engine], config=config.weights)
        buffer = ReplayBuffer(config.buffer)
        buffer.add_engine(engine.name, 0)
        healing = Healing(router, Publishing(), buffer, config.weights)  # type: ignore[arg-type]
        await router.update(fake_manifest(0), Interruption.KEEP)
        engine.faults = Faults(dies_in="fetch", start_error="no memory")
        await router.fetch(fake_manifest(1, base=0))
        with pytest.raises(ExceptionGroup):
            await healing.run(RunPaths(root=scene.model, shared=scene.model))
        return [name for name, _ in engine.calls].count("start")

    return run_virtual(main())
