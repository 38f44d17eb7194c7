"""Measures one run between steps: what was rolled out, who waited for whom, where each engine's and the trainer's seconds went."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

from asyncrl.clock import now_s
from asyncrl.metrics import Metrics
from asyncrl.rollout.probe import Parity
from asyncrl.rollout.router import Router
from asyncrl.rollout.timed_engine import TimedEngine
from asyncrl.types import Rollout, Status

TRAINER_PHASES = ("forward", "backward", "optimizer")
"""What a step's `train/PHASE_s/sum` tell of its own seconds; the rest of them is other."""


class Meter:
    """Collects while rollouts finish; `step` closes one interval and gives its numbers."""

    def __init__(self, router: Router, engines: Sequence[TimedEngine] = ()) -> None:
        self._router, self._engines = router, list(engines)
        self._metrics = Metrics()
        self._at_s = now_s()
        self._busy_s = router.busy_s()
        self._aside_s = self._aside_busy_s = 0.0
        self._trainer_s: defaultdict[str, float] = defaultdict(float)
        self._mismatch: float | None = None
        for engine in engines:
            engine.begin()

    def joined(self, engine: TimedEngine) -> None:
        """Its account begins now."""
        engine.begin()
        self._engines.append(engine)

    def scored(self, rollout: Rollout) -> None:
        """A rollout is finished, whatever becomes of it."""
        self._metrics.sum("rollout/tokens/sum", rollout.num_tokens)
        self._metrics.sum("rollout/errors/sum", float(rollout.status.is_error))
        if rollout.status.is_error:
            self._metrics.sum(f"rollout/error.{rollout.status.value}/sum", 1)
            return
        self._metrics.mean("rollout/truncated_frac/mean", float(rollout.status is Status.LENGTH), count=1)

    def probed(self, parity: Parity) -> None:
        """The parity probe ran: mismatch at equal version, apart from staleness."""
        self._metrics.last("probe/gap/mean", parity.mean_abs)
        self._metrics.last("probe/gap/max", parity.max_abs)
        self._mismatch = parity.mean_abs

    def split(self, step: Mapping[str, float]) -> dict[str, float]:
        """The gap of a step's batch in two, by the newest probe: its own-version tokens have the mismatch alone, the rest is drift.

        Also where every token is stale, and the batch has no tokens of its own to tell.
        """
        gap = step.get("correction/logprob_gap/mean")
        if gap is None or self._mismatch is None:
            return {}
        return {"correction/gap_by_mismatch_probe/value": self._mismatch, "correction/gap_by_drift_probe/value": gap - self._mismatch}

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What runs inside, an evaluation or a probe, belongs to no step: its time counts neither as work nor as waiting."""
        at_s, busy_s = now_s(), self._router.busy_s()
        for engine in self._engines:
            engine.aside(True)
        try:
            yield
        finally:
            for engine in self._engines:
                engine.aside(False)
            self._aside_s += now_s() - at_s
            self._aside_busy_s += self._router.busy_s() - busy_s

    @contextmanager
    def trainer(self, cause: Literal["step", "sync", "checkpoint"], *, blocks: bool = False) -> Iterator[None]:
        """The trainer is at this; `blocks`: in this process, so that nothing else in it goes on."""
        began_s = now_s()
        for engine in self._engines if blocks else ():
            engine.blocked(True)
        try:
            yield
        finally:
            for engine in self._engines if blocks else ():
                engine.blocked(False)
            self._trainer_s[cause] += now_s() - began_s

    def step(self, *, waited_s: float, trained_tokens: int, trained: Mapping[str, float] | None = None) -> Metrics:
        """The numbers since the last call. `waited_s` is how long the trainer had no batch, `trained` what its step measured."""
        now, busy_s = now_s(), self._router.busy_s() - self._aside_busy_s
        whole_s = max(now - self._at_s, 1e-9)
        period_s = max(whole_s - self._aside_s, 1e-9)
        taken, self._metrics = self._metrics, Metrics()
        tokens = taken.result().get("rollout/tokens/sum", 0.0)
        taken.last("train/period_s/last", period_s)
        taken.last("trainer/wait_frac/last", waited_s / period_s)
        taken.last("engine/wait_frac/last", max(0.0, 1.0 - (busy_s - self._busy_s) / period_s))  # rounding may leave −1e-16
        taken.last("rollout/tokens_per_s/last", tokens / whole_s)
        taken.last("train/tokens_per_s/last", trained_tokens / max(period_s - waited_s, 1e-9))
        for engine in self._engines:
            for name, value in dataclasses.asdict(engine.take()).items():
                taken.sum(f"engine/{name}/sum", value)
        self._account_trainer(taken, whole_s=whole_s, waited_s=waited_s, trained=trained or {})
        self._at_s, self._busy_s = now, busy_s + self._aside_busy_s
        self._aside_s = self._aside_busy_s = 0.0
        self._trainer_s.clear()
        return taken

    def _account_trainer(self, metrics: Metrics, *, whole_s: float, waited_s: float, trained: Mapping[str, float]) -> None:
        spent = {phase: trained.get(f"train/{phase}_s/sum", 0.0) for phase in TRAINER_PHASES}
        spent |= {"data": waited_s, "sync": self._trainer_s["sync"], "checkpoint": self._trainer_s["checkpoint"],
                  "evaluation": self._aside_s}
        spent["other"] = whole_s - sum(spent.values())
        metrics.sum("trainer/whole_s/sum", whole_s)
        for cause, seconds in spent.items():
            metrics.sum(f"trainer/{cause}_s/sum", seconds)
