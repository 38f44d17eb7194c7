"""Learning-rate schedules: functions of the policy version alone. Needs no torch."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from asyncrl.errors import ConfigError
from asyncrl.settings import TAGGED, Section


class Constant(Section):
    """The learning rate stays, after a linear warm-up."""

    kind: Literal["constant"]
    warm_up_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises to its value."""

    def factor(self, step: int) -> float:
        """Share of the learning rate in step 0, 1, …"""
        return _warm_up(step, self.warm_up_steps)


class _Descending(Section):
    total_steps: int = Field(ge=1)
    """Where the descent ends, in steps of the run; the run itself may be shorter or longer."""
    warm_up_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises to its value."""
    final_frac: float = Field(default=0.0, ge=0, le=1)
    """Share of the learning rate that is left at the end."""

    @model_validator(mode="after")
    def _the_warm_up_ends_before_the_descent(self) -> _Descending:
        if self.warm_up_steps >= self.total_steps:
            raise ConfigError("trainer.schedule.warm_up_steps, trainer.schedule.total_steps", value=(self.warm_up_steps, self.total_steps),
                              allowed="a warm-up shorter than the whole", remedy="Raise total_steps or lower warm_up_steps.")
        return self


class Linear(_Descending):
    """Linear warm-up, then linear descent to `final_frac` at `total_steps`, where it stays."""

    kind: Literal["linear"]

    def factor(self, step: int) -> float:
        """Share of the learning rate in step 0, 1, …"""
        done = _progress(step, self.warm_up_steps, self.total_steps)
        return _warm_up(step, self.warm_up_steps) * (1 - (1 - self.final_frac) * done)


class Cosine(_Descending):
    """Linear warm-up, then half a cosine down to `final_frac` at `total_steps`, where it stays."""

    kind: Literal["cosine"]

    def factor(self, step: int) -> float:
        """Share of the learning rate in step 0, 1, …"""
        done = _progress(step, self.warm_up_steps, self.total_steps)
        return _warm_up(step, self.warm_up_steps) * (self.final_frac + (1 - self.final_frac) * (1 + math.cos(math.pi * done)) / 2)


Schedule = Annotated[Constant | Linear | Cosine, TAGGED]


def _warm_up(step: int, warm_up_steps: int) -> float:
    return min(1.0, (step + 1) / warm_up_steps) if warm_up_steps else 1.0


def _progress(step: int, warm_up_steps: int, total_steps: int) -> float:
    return min(1.0, max(0.0, (step - warm_up_steps) / max(1, total_steps - warm_up_steps)))
