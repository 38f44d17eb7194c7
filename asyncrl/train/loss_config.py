"""The section `loss`: which function of `asyncrl.correction` is minimised, its arguments, and how token losses become one number.

Needs no torch. The settings of a section beside those of `_Loss` are the arguments of its function, by name.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from asyncrl.errors import ConfigError
from asyncrl.settings import TAGGED, Section


class _Loss(Section):
    anchor: ClassVar[Literal["proximal", "rollout"]]
    """The policy that the current one is compared with. A loss anchored at the rollout policy has the importance ratio in it already, and
    reads no weights."""

    kind: str
    aggregation: Literal["token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_mean", "dr_grpo"] = "token_mean"
    """How token losses become one number; denominators are counted over all ranks, before correction unless it says `kept`."""
    max_tokens: int | None = Field(default=None, ge=1)
    """The constant length of `dr_grpo`, and of nothing else."""

    @model_validator(mode="after")
    def _constant_length_belongs_to_dr_grpo(self) -> _Loss:
        if (self.aggregation == "dr_grpo") != (self.max_tokens is not None):
            raise ConfigError("loss.aggregation, loss.max_tokens", value=(self.aggregation, self.max_tokens),
                              allowed="max_tokens with aggregation dr_grpo, and only there",
                              remedy="Set loss.max_tokens to the token budget of a completion, or choose another aggregation.")
        return self

    @property
    def arguments(self) -> dict[str, Any]:
        """Of the loss function."""
        return {name: getattr(self, name) for name in type(self).model_fields if name not in _Loss.model_fields}


class _Clipped(_Loss):
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """The ratio has no gradient below 1 − this where the advantage is negative. 1707.06347."""
    clip_high: float = Field(default=0.28, ge=0)
    """Nor above 1 + this where it is positive. Clip-higher, DAPO 2503.14476."""
    dual_clip: float | None = Field(default=None, gt=1)
    """The largest ratio that counts where the advantage is negative, above 1 + clip_high. 1912.09729, which has 3."""

    @model_validator(mode="after")
    def _the_dual_clip_is_outside_the_clip(self) -> _Clipped:
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ConfigError("loss.dual_clip, loss.clip_high", value=(self.dual_clip, self.clip_high),
                              allowed="dual_clip above 1 + clip_high",
                              remedy="It is a ratio: the largest that counts where the advantage is negative. The paper has 3.")
        return self


class DecoupledPPO(_Clipped):
    """The clip is around the proximal policy, importance weights account for the policy that sampled. 2505.24298."""

    anchor = "proximal"
    kind: Literal["decoupled_ppo"]


class PPO(_Clipped):
    """The clip is around the policy that sampled. 1707.06347. Takes no importance weights."""

    anchor = "rollout"
    kind: Literal["ppo"]


class Reinforce(_Loss):
    """The policy gradient under the importance weights, without a trust region. Williams 1992."""

    anchor = "proximal"
    kind: Literal["reinforce"]


class ImportanceSampling(_Loss):
    """The advantage times the ratio to the policy that sampled, neither clipped nor weighed. 1502.05477."""

    anchor = "rollout"
    kind: Literal["importance_sampling"]


LossConfig = Annotated[DecoupledPPO | PPO | Reinforce | ImportanceSampling, TAGGED]
