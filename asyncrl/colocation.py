"""Engines and trainer on one device, in turns. Who does not have the turn holds no memory there.

    engines write a batch ──▶ engines sleep ──▶ trainer comes back ──▶ step, checkpoint
          ▲                                                                  │
          └── engines wake, load, verify ◀── trainer goes ◀── version durable ┘

Only where no engine writes while the trainer trains: `max_staleness` 0, or a fixed lag. An engine that slept holds no weights, so every
version is published whole, and the anchor's own state hash proves what the engine woke with.
"""

from __future__ import annotations

from asyncrl.clock import now_s
from asyncrl.colocation_config import NoColocation, TurnsColocation
from asyncrl.metrics import Metrics
from asyncrl.rollout.router import Router
from asyncrl.sync import WeightSync
from asyncrl.train.trainer import Trainer
from asyncrl.weights.config import WeightsConfig


class Turns:
    """Passes the turn between engines and trainer; without colocation it does nothing. Called between the trainer's operations."""

    def __init__(self, config: NoColocation | TurnsColocation, *, router: Router, trainer: Trainer, weights: WeightSync) -> None:
        self._config, self._router, self._trainer, self._weights = config, router, trainer, weights
        self._metrics = Metrics()

    @property
    def taken(self) -> bool:
        """Whether there are turns at all."""
        return isinstance(self._config, TurnsColocation)

    def published(self, weights: WeightsConfig) -> WeightsConfig:
        """How versions are published: whole, where engines come back with nothing."""
        return weights.model_copy(update={"anchor_every_versions": 1}) if self.taken else weights

    async def to_trainer(self) -> None:
        """Engines end what they run and sleep; the trainer's state comes back. Waits until the engines hold the newest version.

        Raises RunAborted when no engine is left.
        """
        if not self.taken:
            return
        await self._weights.applied()
        began_s = now_s()
        slept = (await self._router.sleep()).values()
        self._metrics.last("colocation/sleep_s/last", now_s() - began_s)
        self._metrics.last("colocation/engine_freed_bytes/last", sum(one.freed_bytes for one in slept))
        self._metrics.last("colocation/engine_resident_bytes/last", sum(one.resident_bytes for one in slept))
        began_s = now_s()
        if await self._trainer.onload():
            self._metrics.last("colocation/onload_s/last", now_s() - began_s)

    async def to_engines(self) -> None:
        """The trainer's version becomes durable and its state goes; engines wake with their next update."""
        if not (isinstance(self._config, TurnsColocation) and self._config.trainer == "offload"):
            return
        await self._trainer.publish()
        began_s = now_s()
        self._metrics.last("colocation/trainer_moved_bytes/last", await self._trainer.offload())
        self._metrics.last("colocation/offload_s/last", now_s() - began_s)

    def take_metrics(self) -> Metrics:
        """What was measured since the last call."""
        taken, self._metrics = self._metrics, Metrics()
        return taken
