"""The section `advantages`: which estimator, and what length costs. Needs no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from asyncrl.errors import ConfigError
from asyncrl.settings import TAGGED, Section
from asyncrl.train.critic_config import CriticConfig


class NoOverlong(Section):
    """Length costs nothing."""

    kind: Literal["none"]


class SoftOverlong(Section):
    """0 to −`weight` over the last `cache_tokens` of `max_tokens`, −`weight` beyond. DAPO, 2503.14476, equation 13."""

    kind: Literal["soft"]
    max_tokens: int = Field(ge=1)
    """Sampled tokens of a rollout at which the penalty is whole; as a rule all it may write."""
    cache_tokens: int = Field(ge=1)
    """Over how many tokens before that it grows; 4096 of 20480 in the paper."""
    weight: float = Field(default=1.0, gt=0)
    """The whole penalty, in units of reward; 1 in the paper, whose rewards are −1 and 1."""

    @model_validator(mode="after")
    def _the_cache_lies_below_the_limit(self) -> SoftOverlong:
        if self.cache_tokens > self.max_tokens:
            raise ConfigError("advantages.overlong.max_tokens, advantages.overlong.cache_tokens",
                              value=(self.max_tokens, self.cache_tokens), allowed="cache_tokens of at most max_tokens",
                              remedy="The penalty grows over the last cache_tokens of max_tokens.")
        return self


OverlongConfig = Annotated[NoOverlong | SoftOverlong, TAGGED]


class _Shaped(Section):
    overlong: OverlongConfig = NoOverlong(kind="none")
    """What a rollout near its token limit loses before any baseline. `buffer.zero_variance` and reward metrics go by the reward alone."""


class GRPO(_Shaped):
    """(r − mean) / std of the group. 2402.03300."""

    kind: Literal["grpo"]
    unbiased_std: bool = True
    """Divide by n − 1 as TRL and verl do, not by n; the paper says neither."""


class DrGRPO(_Shaped):
    """r − mean of the group. 2503.20783."""

    kind: Literal["dr_grpo"]


class RLOO(_Shaped):
    """r − mean of the other rollouts of the group. 2402.14740."""

    kind: Literal["rloo"]


class MaxRL(Section):
    """(r − mean) / mean of the group, for rewards 0 and 1: a group with a mean of 0 or less teaches nothing. 2602.02710."""

    kind: Literal["maxrl"]


class OPO(_Shaped):
    """r − mean of the group, weighted by length: the baseline of least variance. 2505.23585."""

    kind: Literal["opo"]


class ReinforcePlusPlus(_Shaped):
    """r, whitened over all tokens of the batch: `buffer.group_size` may be 1, and groups of equal rewards teach, if kept. 2501.03262."""

    kind: Literal["reinforce_plus_plus"]
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount a sampled token, counted from the end."""


class ReinforcePlusPlusBaseline(_Shaped):
    """r − mean of the group, whitened over all tokens of the batch: one scale for all groups. 2501.03262."""

    kind: Literal["reinforce_plus_plus_baseline"]


class GAE(_Shaped):
    """What came against what a critic expected, over the sampled tokens of a sequence: PPO. `buffer.group_size` may be 1, and groups of
    equal rewards teach, if kept. 1506.02438."""

    kind: Literal["gae"]
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount a sampled token."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """1: returns minus values; 0: the one-step error. 0.95 in TRL, 1 in verl."""
    whiten: bool = True
    """To mean 0 and variance 1 over all loss tokens of the batch, as in TRL and verl; the critic's returns are not."""
    critic: CriticConfig = CriticConfig()
    """What the values come from."""


AdvantagesConfig = Annotated[GRPO | DrGRPO | RLOO | MaxRL | OPO | ReinforcePlusPlus | ReinforcePlusPlusBaseline | GAE, TAGGED]
