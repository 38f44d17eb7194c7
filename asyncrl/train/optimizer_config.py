"""Settings of the optimizer: the same for reinforcement learning and supervised training. Needs no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from asyncrl.settings import TAGGED, Section, refuse_unread, require_pattern
from asyncrl.train.schedule import Constant, Schedule

LearningRate = Annotated[float, Field(gt=0, le=1)]
"""Of AdamW, whose update of a weight is about this large: above 1 nothing of the model would be left after a step."""
Betas = tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]]
"""Decay of AdamW's first and second moment, a step."""


class LearningRateGroup(Section):
    """Parameters with a learning rate of their own."""

    match: str = Field(min_length=1)
    """A regular expression found anywhere in a parameter's name, as the loaded model has it (`named_parameters`): all experts of a layer
    are one tensor there, whatever the files call them. Of several groups the first one that matches decides."""
    factor: float = Field(gt=0, le=1e6)
    """What their learning rate is, as a share of `learning_rate`."""
    weight_decay: float | None = Field(default=None, ge=0, le=1)
    """Of all of them, norms and biases too; None: as everywhere."""


class NoScale(Section):
    """The learning rate is the schedule's."""

    kind: Literal["none"] = "none"


class EssScale(Section):
    """The learning rate falls with the effective sample size of stale data: VCPO, 2602.17616, equation 5. At every update, by the raw
    importance weights of its sequences."""

    kind: Literal["ess"]
    rule: Literal["sqrt", "linear"] = "sqrt"
    """(ESS share / reference)^½, the paper's rule for AdamW, or without the root, its authors' option for SGD; never above 1."""
    reference: float | None = Field(default=None, gt=0, le=1)
    """ESS as a share of the batch where nothing is stale; below 1 where engine and trainer disagree even then. None: measured."""
    reference_updates: int = Field(default=1, ge=1)
    """It is measured as the mean over so many first updates, whose own scale is 1. The first batch of a run is never stale."""

    @model_validator(mode="after")
    def _what_is_given_is_not_measured(self) -> EssScale:
        if self.reference is not None:
            refuse_unread(self, ["reference_updates"], where="learning_rate_scale", beside="learning_rate_scale.reference",
                          value=self.reference)
        return self


LearningRateScale = Annotated[NoScale | EssScale, TAGGED]


class OptimizerSettings(Section):
    """AdamW, its schedule, and which parameters it moves."""

    learning_rate: LearningRate
    """Of AdamW, at the schedule's highest."""
    schedule: Schedule = Constant(kind="constant")
    """A function of the policy version alone, so a resumed run follows it exactly."""
    betas: Betas = (0.9, 0.95)
    """Of AdamW; 0.95 forgets old gradients in 20 steps, as GPT-3 (2005.14165) and DeepSeek-V3 (2412.19437) have it."""
    eps: float = Field(default=1e-8, gt=0, le=1)
    """Of AdamW, added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0, le=1)
    """Decoupled; on matrices alone, not on norms and biases."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """A gradient longer than this, over all parameters that train, is scaled down to it."""
    adamw: Literal["auto", "fused", "foreach"] = "auto"
    """Which of torch's kernels: one pass over memory, or one for each operation. `auto`: fused where the device has it, CPU and CUDA."""
    learning_rate_groups: tuple[LearningRateGroup, ...] = ()
    """Learning rates of their own, by name of the parameter. Names of one tied weight go into one group."""
    frozen: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Regular expressions; a parameter in whose name, as the loaded model has it, one is found does not train: no gradient, no moments,
    nothing to publish. All names of a tied weight are to match, or none."""
    offload_optimizer: bool = False
    """AdamW's moments, 8 bytes a parameter, lie in CPU memory and visit the device 256 MB at a time; the result has the same bits. On a
    CPU that saves nothing, and is done all the same."""

    @model_validator(mode="after")
    def _names_are_matched_by_patterns(self) -> OptimizerSettings:
        for number, pattern in enumerate(self.frozen):
            require_pattern(pattern, field=f"trainer.frozen.{number}")
        for number, group in enumerate(self.learning_rate_groups):
            require_pattern(group.match, field=f"trainer.learning_rate_groups.{number}.match")
        return self

    def learning_rate_at(self, version: int) -> float:
        """Of the step that trains from this policy version."""
        return self.learning_rate * self.schedule.factor(version)
