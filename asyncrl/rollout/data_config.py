"""Settings of the order in which the prompts of one data set are asked, and of which are left out."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from asyncrl.errors import ConfigError
from asyncrl.settings import TAGGED, Section


class NoShuffle(Section):
    """The order of the data, every epoch."""

    kind: Literal["none"] = "none"


class FullShuffle(Section):
    """Another permutation of the whole data set each epoch, by the run's seed. Needs a list."""

    kind: Literal["full"]


class BufferShuffle(Section):
    """Each prompt is drawn from a buffer that the data refill: for what is too long, or endless, to be a list."""

    kind: Literal["buffer"]
    rows: int = Field(default=1024, ge=2, le=10_000_000)
    """Size of the buffer. It is filled before the first prompt, and again after a resume."""


ShuffleConfig = Annotated[NoShuffle | FullShuffle | BufferShuffle, TAGGED]


class NoCurriculum(Section):
    """Every prompt is asked in every epoch."""

    kind: Literal["none"] = "none"


class PassRateCurriculum(Section):
    """Prompts that the policy always or never solves are passed over for a while: their groups would have no gradient.

    A prompt is judged by its newest `min_rollouts` rollouts, and asked again, with an empty record, when the verdict has expired. Of a
    data set of n rows at most n / `recheck_after_prompts` of what is asked is such a re-check, however much of it is solved; only where
    nothing else is left, all of it is. Verdicts are kept in memory, about 160 bytes a row, and in checkpoints, about 50.
    """

    kind: Literal["pass_rate"]
    success_reward: float = 1.0
    """A rollout with at least this reward is a success. One that failed with an error does not count."""
    solved_above: float | None = Field(default=1.0, ge=0.0, le=1.0)
    """With this pass rate or more a prompt is solved; None: none ever is. Where each reward is 0 or 1 the default passes over those alone
    that teach a group-relative policy nothing."""
    hopeless_below: float | None = Field(default=0.0, ge=0.0, le=1.0)
    """With this pass rate or less a prompt is hopeless; None: none ever is. Where a reward below `success_reward` teaches something too,
    None, or a lower `success_reward`, keeps it."""
    min_rollouts: int = Field(default=16, ge=1)
    """How many rollouts, the newest, a verdict takes. A prompt of pass rate 0.8 has sixteen successes in a row by chance in 3% of cases."""
    recheck_after_prompts: int | None = Field(default=None, ge=1)
    """How many prompts of its source are asked before a verdict expires; None: four times the rows of the data."""

    @model_validator(mode="after")
    def _a_prompt_may_be_neither(self) -> PassRateCurriculum:
        if self.hopeless_below is not None and self.solved_above is not None and self.hopeless_below >= self.solved_above:
            raise ConfigError("curriculum.hopeless_below, curriculum.solved_above", value=(self.hopeless_below, self.solved_above),
                              allowed="hopeless_below < solved_above", remedy="Leave room between them for prompts worth asking.")
        return self


CurriculumConfig = Annotated[NoCurriculum | PassRateCurriculum, TAGGED]


class DataSettings(Section):
    """How the prompts of one data set are asked."""

    epochs: int | None = Field(default=None, ge=1)
    """How often to go through the data; None as long as the run asks."""
    shuffle: ShuffleConfig = NoShuffle()
    """`none`, `full`, or `{kind: buffer, rows: N}`."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Longer prompts are passed over and counted; None passes over those alone that leave no room in the engine's context."""
    curriculum: CurriculumConfig = NoCurriculum()
    """`none` or `{kind: pass_rate, …}`."""

    @property
    def goes_by_rewards(self) -> bool:
        """Whether the rewards that have come in decide what is asked next."""
        return isinstance(self.curriculum, PassRateCurriculum)
