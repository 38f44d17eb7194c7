"""Weights from the trainer to the engines, and word of it to the buffer: the edge that closes the loop."""

from __future__ import annotations

import asyncio

from asyncrl.buffer.replay_buffer import ReplayBuffer
from asyncrl.clock import now_s
from asyncrl.errors import ConfigError
from asyncrl.healing import Healing
from asyncrl.metrics import Metrics
from asyncrl.rollout.engine import Interruption
from asyncrl.rollout.router import Router
from asyncrl.train.trainer import Trainer
from asyncrl.weights.config import WeightsConfig
from asyncrl.weights.density import density_ratio
from asyncrl.weights.manifest import Manifest


class WeightSync:
    """Publishes the trainer's weights and has every engine fetch, then apply them, one version at a time, the newest next.

    A slot of the buffer is freed only by the acknowledgements that this class, or `healing`, passes on.
    """

    def __init__(self, trainer: Trainer, router: Router, buffer: ReplayBuffer, config: WeightsConfig) -> None:
        self._trainer, self._router, self._buffer = trainer, router, buffer
        self._interruption = Interruption(config.interruption)
        self._is_pushed = config.transport.kind == "nccl"
        self._pending: asyncio.Queue[Manifest] = asyncio.Queue()
        self._published = -1
        self._metrics = Metrics()
        self.healing = Healing(router, trainer, buffer, config)

    @property
    def published_version(self) -> int:
        """The newest that is on its way to the engines, or there; -1 before the first."""
        return self._published

    async def publish(self) -> Manifest:
        """Encode and store what changed, and queue it for the engines. Returns when the version is durable, or delivered where versions
        are pushed; not applied.

        A version that is published already is not sent again. One that is pushed waits until engines have applied the one before: only
        then is that the base of the next.
        """
        if self._is_pushed and self._published >= 0:
            await self._trainer.keep(await self.applied())
        manifest = await self._trainer.publish()
        if manifest.version != self._published:
            self._published = manifest.version
            self._measure_density(manifest.density, predicted=self._trainer.predicted_density)
            self._pending.put_nowait(manifest)
            if self._is_pushed:
                await self._trainer.deliver(manifest, self._router.unfenced)
        return manifest

    async def start(self) -> None:
        """Publish the anchor and wait until the engines hold it; none serves before."""
        applying = asyncio.create_task(self.apply_next())
        try:
            await self.publish()
            await applying
        finally:
            applying.cancel()

    async def apply_next(self) -> None:
        """Have every engine fetch and apply the next published version, or a newer one that was published meanwhile.

        Waits for: a published version; with `drain`, the end of running rollouts. Unblocks: admission, through acknowledgements.
        """
        manifest = await self._pending.get()
        began_s = now_s()
        while True:
            for seconds in (await self._router.fetch(manifest)).values():
                self._metrics.mean("weights/fetch_s/mean", seconds, count=1)
            if self._pending.empty():
                break
            manifest = self._pending.get_nowait()
        await self._apply(manifest, began_s=began_s)

    async def applied(self) -> int:
        """Wait until the engines that serve hold the newest published version, if any; returns it. Raises RunAborted when none can."""
        if self._published < 0:
            return self._published
        await self._router.until(lambda: self._router.holds(self._published) or not self._router.has_hope)
        self._router.require_hope()
        return self._published

    def require_late_joiners(self) -> None:
        """Raise ConfigError where an engine that comes late can have no version."""
        if self._is_pushed:
            raise ConfigError("weights.transport.kind", value="nccl", allowed="store, for an engine that comes late",
                              remedy="A version is pushed once. Take transport.kind=store, or begin with all engines.")

    def take_metrics(self) -> Metrics:
        """What was measured since the last call."""
        taken, self._metrics = self._metrics, Metrics()
        taken.merge(self.healing.take_metrics())
        return taken

    def _measure_density(self, observed: float, *, predicted: float | None) -> None:
        self._metrics.mean("weights/density/mean", observed, count=1)
        if predicted is not None:
            self._metrics.mean("weights/density_predicted/mean", predicted, count=1)
            self._metrics.last("weights/density_ratio/last", density_ratio(observed, predicted=predicted))

    async def _apply(self, manifest: Manifest, *, began_s: float) -> None:
        update = await self._router.update(manifest, self._interruption)
        for name, ack in update.acks.items():
            self._buffer.acknowledge(name, ack.version)
            self._metrics.mean("weights/pause_s/mean", ack.pause_s, count=1)
            self._metrics.sum("weights/recomputed_tokens/sum", ack.recomputed_tokens)
        for name in update.failed:
            self._buffer.fence(name)
        self.healing.updated(update.acks)
        self._metrics.mean("weights/sync_s/mean", now_s() - began_s, count=1)
        if update.woken:
            self._metrics.last("colocation/wake_s/last", update.seconds)
        self._metrics.mean("weights/payload_bytes/mean", manifest.payload_bytes, count=1)
        if not self.healing.reads_anchors:
            self._trainer.retain(self._router.slowest)
