"""Trainer ranks and engines as children: versions that are pushed to them are those that they would pull."""

import asyncio
import contextlib
import os
import signal

import pytest

from asyncrl.paths import RunPaths
from asyncrl.rollout.router import Router
from asyncrl.rollout.transformers_engine import TransformersEngine
from asyncrl.sync import WeightSync
from asyncrl.train.trainer import Trainer
from asyncrl.weights.config import WeightsConfig
from tests.rollout.model_rig import publish_model
from tests.train.train_data import random_batch

pytestmark = pytest.mark.slow

STEPS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return publish_model(tmp_path_factory.mktemp("pushed")).folder


class Fleet:
    """What a buffer hears of engines."""

    def __init__(self):
        self.holds, self.fenced = {}, []

    def acknowledge(self, engine, version):
        self.holds[engine] = version

    def fence(self, engine):
        self.fenced.append(engine)


class Scene:
    """Ranks, two engines, and what carries weights from these to those."""

    def __init__(self, model, folder, *, ranks, transport):
        weights = WeightsConfig(transport=transport, dtype="float32", anchor_every_versions=3)
        self.paths = RunPaths(root=folder / "run", shared=folder / "shared", transport=weights.transport.model_dump())
        self.paths.make()
        self.trainer = Trainer(model, correction="token_tis", processes=ranks, learning_rate=1e-2, max_grad_norm=1e9)
        self.engines = [TransformersEngine(model, name=f"engine-{number}") for number in range(2)]
        self.fleet = Fleet()
        self.router = Router(self.engines)
        self.sync = WeightSync(self.trainer, self.router, self.fleet, weights)
        self.weights = weights

    @contextlib.asynccontextmanager
    async def running(self):
        applying = None
        try:
            async with asyncio.timeout(200):
                await asyncio.gather(self.trainer.start(self.paths, weights=self.weights),
                                     *(engine.start(self.paths) for engine in self.engines))
                await self.sync.start()
                applying = asyncio.create_task(self.apply_all())
                yield
        finally:
            if applying is not None:
                applying.cancel()
            await asyncio.gather(self.trainer.close(), *(engine.close() for engine in self.engines))

    async def apply_all(self):
        while True:
            await self.sync.apply_next()

    async def step(self):
        await self.trainer.step(random_batch(self.trainer.version, version=self.trainer.version))
        manifest = await self.sync.publish()
        await self.sync.applied()
        return manifest.base, manifest.state_hash


def states(model, folder, **settings):
    async def main():
        scene = Scene(model, folder, **settings)
        async with scene.running():
            found = [await scene.step() for _ in range(STEPS)]
            assert scene.fleet.holds == {"engine-0": STEPS, "engine-1": STEPS}
            return found
    return asyncio.run(main())


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_version_that_is_pushed_is_the_state_that_would_be_pulled(model, tmp_path, ranks):
    pushed = states(model, tmp_path / "pushed", ranks=ranks, transport="nccl")
    pulled = states(model, tmp_path / "pulled", ranks=ranks, transport="store")
    assert pushed == pulled
    assert [base for base, _ in pushed] == [0, 1, None, 3]
    assert len({state for _, state in pushed}) == STEPS
    assert not list((tmp_path / "pushed").rglob("part-*"))


def test_an_engine_that_is_killed_while_a_version_is_delivered_costs_the_other_nothing(model, tmp_path):
    async def main():
        scene = Scene(model, tmp_path, ranks=1, transport="nccl")
        async with scene.running():
            await scene.step()
            child, deliver, delivering = scene.engines[1]._child.pid, scene.trainer.deliver, asyncio.Event()

            async def seen(*given):
                delivering.set()
                await deliver(*given)

            scene.trainer.deliver = seen
            os.kill(child, signal.SIGSTOP)
            stepping = asyncio.create_task(scene.step())
            await delivering.wait()
            os.kill(child, signal.SIGKILL)
            await stepping
            assert scene.fleet.holds == {"engine-0": 2, "engine-1": 1}
            assert scene.router.unfenced == ("engine-0",)
            await scene.step()
            assert scene.fleet.holds["engine-0"] == 3
    asyncio.run(main())
