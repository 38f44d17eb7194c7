"""The settings of a run that belong to none of its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.colocation_config import NoColocation, TurnsColocation
from asyncrl.rollout.eval_set import EvalSet
from asyncrl.rollout.task_config import ProbeConfig
from asyncrl.run_state import Resume
from asyncrl.settings import validated
from asyncrl.weights.config import WeightsConfig


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What a run needs beyond its parts."""

    name: str = "run"
    folder: str | Path = "runs"
    seed: int = 0
    weights: WeightsConfig | Mapping[str, Any] = field(default_factory=WeightsConfig)
    """Or its fields as a mapping."""
    probe: ProbeConfig | Mapping[str, Any] = field(default_factory=ProbeConfig)
    """Or its fields as a mapping."""
    error_budget: float = 0.5
    """Share of the newest 64 rollouts, of all and of each source, that may fail; one more ends the run."""
    deterministic: bool = False
    """Two runs on one machine give the same bits; docs/determinism.md says what that needs and what it costs."""
    eval_sets: tuple[EvalSet, ...] = ()
    """Held-out sets, what `Run.evaluate` asks."""
    colocation: NoColocation | TurnsColocation = field(default_factory=NoColocation)
    """Whether engines and trainer share a device, each with its memory in turn: docs/engines.md."""
    resume: Resume = None
    """Whether to go on from a checkpoint in the run's folder."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", validated(WeightsConfig, self.weights, name="weights"))
        object.__setattr__(self, "probe", validated(ProbeConfig, self.probe, name="probe"))
