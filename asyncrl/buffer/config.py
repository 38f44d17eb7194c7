"""The settings of the replay buffer and what they may be together."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from asyncrl.buffer.admission import least_depth_groups
from asyncrl.buffer.depth import Depth
from asyncrl.buffer.policies import Drop, FixedLag, Lease, Policy, Soft, TokenMask, require_publish_every_step
from asyncrl.errors import ConfigError
from asyncrl.settings import TAGGED, Seconds, Section, refuse_unread, validated


class LeaseConfig(Section):
    """No token is ever staler than `max_staleness`."""

    kind: Literal["lease"] = "lease"


class SoftConfig(Section):
    """AReaL's rule: the mean staleness stays at `max_staleness`, single tokens may exceed it."""

    kind: Literal["soft"] = "soft"


class DropConfig(Section):
    """Groups with a token staler than `cut_staleness` are dropped and their prompts begun anew; long answers are lost most."""

    kind: Literal["drop"] = "drop"
    cut_staleness: int = Field(ge=0)
    """No token staler than this is trained on; at least publish_every_steps − 1. `max_staleness` says how far ahead engines work."""


class TokenMaskConfig(Section):
    """Tokens staler than `cut_staleness` carry no gradient; the rest of their rollouts does."""

    kind: Literal["token_mask"] = "token_mask"
    cut_staleness: int = Field(ge=0)
    """No token staler than this has a gradient; at least publish_every_steps − 1. `max_staleness` says how far ahead engines work."""


class FixedLagConfig(Section):
    """Every token exactly `lag_steps` old; engines and trainer take turns. For experiments."""

    kind: Literal["fixed_lag"] = "fixed_lag"
    lag_steps: int = Field(ge=0)
    """n, at most `max_staleness`; the first n batches are younger, for lack of an older version."""


PolicyConfig = Annotated[LeaseConfig | SoftConfig | DropConfig | TokenMaskConfig | FixedLagConfig, TAGGED]


class BufferConfig(Section):
    """What a batch is, how old it may be, and how long anyone waits for it."""

    groups_per_step: int = Field(ge=1, le=65_536)
    """P: groups of one batch."""
    group_size: int = Field(ge=1, le=4096)
    """Rollouts of one prompt, all begun at once; at least 2 to learn anything."""
    max_staleness: int = Field(ge=0)
    """K: how many steps behind the trainer the version that wrote a token may be. 0 is synchronous."""
    policy: PolicyConfig = LeaseConfig()
    """What the bound promises."""
    window: int | None = Field(default=None, ge=1)
    """W, `lease` only: a group may be overtaken by W − 1 others. None: 1 + floor(0.3 · P), or what K leaves room for."""
    depth_groups: Literal["auto", "max"] | Annotated[int, Field(ge=1)] = "auto"
    """Slots the run wants to hold at once: `auto` follows the trainer's waiting, `max` is all the bound allows."""
    zero_variance: Literal["drop", "keep"] = "drop"
    """Groups whose valid rewards are all equal carry no gradient under a group baseline."""
    zero_variance_tolerance: float = Field(default=1e-6, ge=0)
    """Rewards are equal when max − min is at most this; the standard deviation of equal float32 rewards need not be 0."""
    min_valid_rollouts: int | None = Field(default=None, ge=1)
    """A group with fewer rollouts without error is dropped. None: 2, or 1 when `group_size` is 1."""
    max_bytes: int | None = Field(default=None, ge=1)
    """No group is admitted while the stored arrays take this much, unless what the next publish needs is not admitted yet."""
    stall_timeout_s: Seconds = 1800.0
    """A wait that sees nothing happen for so long raises BufferStarved; it must exceed the longest rollout and the longest step."""
    max_empty_fills: int = Field(default=8, ge=1)
    """After so many batches' worth of zero-variance groups, with none kept between them, the run stops with a diagnosis."""

    @model_validator(mode="after")
    def check(self) -> BufferConfig:
        """Raises ConfigError for a pair that cannot work. What depends on the publish interval: `check_publish_interval`."""
        _check_policy_fields(self)
        _check_rollouts(self)
        if self.zero_variance == "keep":
            refuse_unread(self, ["max_empty_fills"], where="buffer", beside="buffer.zero_variance", value="keep")
        make_policy(self)
        return self

    @property
    def least_valid_rollouts(self) -> int:
        """`min_valid_rollouts` with the default filled in."""
        return min(2, self.group_size) if self.min_valid_rollouts is None else self.min_valid_rollouts


def may_be_stale(config: BufferConfig) -> bool:
    """Whether a token with a gradient may be older than the weights it trains."""
    if isinstance(config.policy, DropConfig | TokenMaskConfig):
        return config.policy.cut_staleness > 0
    return config.max_staleness > 0 or isinstance(config.policy, SoftConfig)


def buffer_config(**settings: Any) -> BufferConfig:
    """The checked configuration. Raises ConfigError, naming the field, for whatever pydantic would refuse."""
    return validated(BufferConfig, settings, name="buffer")


def check_publish_interval(config: BufferConfig, publish_every_steps: int) -> None:
    """Raise ConfigError unless policy, window and depth work when engines get weights every `publish_every_steps`."""
    make_depth(config, make_policy(config, publish_every_steps=publish_every_steps), publish_every_steps=publish_every_steps)


def make_policy(config: BufferConfig, *, publish_every_steps: int = 1, start_version: int = 0) -> Policy:
    """The policy the configuration names. Raises ConfigError when it cannot work with the publish interval."""
    if publish_every_steps < 1:
        raise ConfigError("weights.publish_every_steps", value=publish_every_steps, allowed="an integer of at least 1",
                          remedy="1 publishes after every step.")
    if isinstance(config.policy, FixedLagConfig):
        require_publish_every_step(publish_every_steps)
        return FixedLag(groups_per_step=config.groups_per_step, lag_steps=config.policy.lag_steps, start_version=start_version)
    ahead = {"groups_per_step": config.groups_per_step, "max_staleness": config.max_staleness,
             "publish_every_steps": publish_every_steps}
    if isinstance(config.policy, SoftConfig):
        return Soft(**ahead)
    if isinstance(config.policy, DropConfig):
        return Drop(**ahead, cut_staleness=config.policy.cut_staleness)
    if isinstance(config.policy, TokenMaskConfig):
        return TokenMask(**ahead, cut_staleness=config.policy.cut_staleness)
    return Lease(**ahead, window=config.window)


def make_depth(config: BufferConfig, policy: Policy, *, publish_every_steps: int = 1) -> Depth:
    """How far ahead to work, inside the policy's capacity. Raises ConfigError for a depth outside [k · P, capacity]."""
    most = policy.capacity_groups
    if config.depth_groups == "max" or isinstance(config.policy, FixedLagConfig):
        return Depth.fixed(most)
    least = least_depth_groups(config.groups_per_step, publish_every_steps=publish_every_steps)
    if config.depth_groups == "auto":
        return Depth.auto(groups_per_step=config.groups_per_step, least_groups=least, most_groups=most)
    if not least <= config.depth_groups <= most:
        raise ConfigError("buffer.depth_groups, buffer.groups_per_step, buffer.max_staleness", allowed=f"a depth from {least} to {most}",
                          value=(config.depth_groups, config.groups_per_step, config.max_staleness),
                          remedy="Less cannot fill the batches of one publish interval, more would break the bound; 'auto' finds a depth.")
    return Depth.fixed(config.depth_groups)


def _check_policy_fields(config: BufferConfig) -> None:
    kind = config.policy.kind
    if config.window is not None and kind != "lease":
        raise ConfigError("buffer.window, buffer.policy.kind", value=(config.window, kind), allowed="a window with the policy lease alone",
                          remedy="Remove the window, or choose lease.")
    if not isinstance(config.policy, FixedLagConfig):
        return
    if config.depth_groups != "auto":
        raise ConfigError("buffer.depth_groups, buffer.policy.kind", value=(config.depth_groups, kind),
                          allowed="no depth with fixed_lag, which fixes it to (lag_steps + 1) * groups_per_step",
                          remedy="Remove the depth.")
    if config.max_bytes is not None:
        raise ConfigError("buffer.max_bytes, buffer.policy.kind", value=(config.max_bytes, kind),
                          allowed="no limit with fixed_lag, which trains only when every slot is filled", remedy="Remove the limit.")
    if config.policy.lag_steps > config.max_staleness:
        raise ConfigError("buffer.policy.lag_steps, buffer.max_staleness", value=(config.policy.lag_steps, config.max_staleness),
                          allowed="lag_steps <= max_staleness", remedy="Raise max_staleness to the lag you want to train at.")


def _check_rollouts(config: BufferConfig) -> None:
    if config.least_valid_rollouts > config.group_size:
        raise ConfigError("buffer.min_valid_rollouts, buffer.group_size", value=(config.min_valid_rollouts, config.group_size),
                          allowed="min_valid_rollouts <= group_size", remedy="A group cannot have more valid rollouts than rollouts.")
