"""The edge from trainer to engines: each version once, in order, and word of it to the buffer."""

from __future__ import annotations

import asyncio

from asyncrl.buffer.replay_buffer import ReplayBuffer
from asyncrl.clock import run_virtual
from asyncrl.rollout.fake_engine import FakeEngine, fake_manifest
from asyncrl.rollout.router import Router
from asyncrl.sync import WeightSync
from asyncrl.weights.config import WeightsConfig
from asyncrl.weights.manifest import Manifest


class Publishing:
    """A trainer that publishes its version: an anchor, then deltas."""

    def __init__(self) -> None:
        self.version = 0
        self.predicted_density: float | None = None
        self.retained: list[int] = []

    async def publish(self) -> Manifest:
        return fake_manifest(self.version, base=self.version - 1 if self.version else None)

    def retain(self, oldest_version: int) -> None:
        self.retained.append(oldest_version)


async def started() -> tuple[WeightSync, Publishing, FakeEngine]:
    trainer, engine = Publishing(), FakeEngine()
    buffer = ReplayBuffer(groups_per_step=1, group_size=1, max_staleness=1)
    buffer.add_engine(engine.name, 0)
    sync = WeightSync(trainer, Router([engine]), buffer, WeightsConfig())  # type: ignore[arg-type]
    await sync.start()
    return sync, trainer, engine


async def apply_all(sync: WeightSync) -> None:
    while True:
        await sync.apply_next()


def test_a_version_published_twice_is_applied_once_and_fences_nobody():
    async def main():
        sync, _, engine = await started()
        running = asyncio.create_task(apply_all(sync))
        await sync.publish()
        await sync.publish()
        assert await sync.applied() == 0
        await asyncio.sleep(1)
        assert [name for name, _ in engine.calls].count("apply") == 1
        running.cancel()
    run_virtual(main())


def test_what_every_engine_has_passed_is_no_longer_retained():
    async def main():
        _, trainer, _ = await started()
        assert trainer.retained == [0]
    run_virtual(main())


def test_the_density_of_a_delta_is_measured_beside_the_predicted_one():
    async def main():
        sync, trainer, _ = await started()
        assert sync.take_metrics().result().keys().isdisjoint({"weights/density_predicted/mean", "weights/density_ratio/last"})
        trainer.version, trainer.predicted_density = 1, 0.25
        manifest = await sync.publish()
        found = sync.take_metrics().result()
        assert found["weights/density/mean"] == manifest.density
        assert found["weights/density_predicted/mean"] == 0.25
        assert found["weights/density_ratio/last"] == manifest.density / 0.25
    run_virtual(main())
