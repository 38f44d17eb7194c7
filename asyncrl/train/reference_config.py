"""The section `reference`: whether the policy is held to the model it started from, and how. Needs no torch."""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from asyncrl.errors import ConfigError
from asyncrl.settings import TAGGED, Section

_NO_PULL = MappingProxyType({
    "k1": "Its gradient in a loss has mean 0: noise and no pull. It is right in the reward: reference.kind=in_reward.",
    "k3": "In a loss it pulls by the other direction, KL(reference ‖ current): name it k3_forward, or take k3_importance."})


class NoReference(Section):
    """Nothing holds the policy but its clip."""

    kind: Literal["none"] = "none"


class InLoss(Section):
    """A term of the loss, of each token that the correction keeps. Its gradient is that of a divergence, named by the estimator."""

    kind: Literal["in_loss"]
    coefficient: float = Field(gt=0)
    """Of the term; GRPO has 0.04, 2402.03300, later recipes 1e-3 or nothing."""
    estimator: Literal["k3_importance", "k2", "k3_forward"] = "k3_importance"
    """`k3_importance`: KL(current ‖ reference), whichever policy sampled, 2512.02556. `k2`: the same, of tokens that the current policy
    sampled. `k3_forward`: KL(reference ‖ current), of such tokens; GRPO's k3."""
    equal_rewards: Literal["pull", "leave"] = "pull"
    """Groups of equal rewards have no advantage. The term pulls them all the same, or leaves them alone; they come if
    `buffer.zero_variance` keeps them."""

    @field_validator("estimator", mode="before")
    @classmethod
    def _the_estimator_pulls(cls, given: Any) -> Any:
        if isinstance(given, str) and given in _NO_PULL:
            raise ConfigError("reference.estimator", value=given, allowed="one of k3_importance, k2, k3_forward", remedy=_NO_PULL[given])
        return given


class InReward(Section):
    """A penalty in the reward: coefficient · (log π − log π_ref) of each loss token, of the policy the step starts from, which costs a
    forward over the batch. k1, whose pull through a policy gradient is that of KL(current ‖ reference); no other estimator's is that of a
    divergence there. 1909.08593.

    Each token pays for itself where advantages are made of token rewards, with `gae` and `reinforce_plus_plus`. With all others the sum
    over a rollout is taken off its reward, before any baseline. `buffer.zero_variance` and reward metrics go by the reward alone.
    """

    kind: Literal["in_reward"]
    coefficient: float = Field(gt=0)
    """Reward that a nat costs; verl and TRL's PPO have 0.001 and 0.05."""


ReferenceConfig = Annotated[NoReference | InLoss | InReward, TAGGED]
