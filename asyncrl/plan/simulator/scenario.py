"""What is simulated: engines, trainer, weight updates, failures, workload, and the settings of the real buffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asyncrl.buffer.config import BufferConfig, check_publish_interval
from asyncrl.errors import ConfigError
from asyncrl.plan.checks import at_least, whole
from asyncrl.plan.lengths import Lengths
from asyncrl.plan.simulator.instance import Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """Seconds of a step: `fixed_s`, and so much for every token of the batch, prompts included."""

    s_per_token: float
    fixed_s: float = 0.0

    def __post_init__(self) -> None:
        at_least(0, s_per_token=self.s_per_token, fixed_s=self.fixed_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Updates:
    """How a version comes to the engines."""

    stall_s: float
    """For so long an engine decodes nothing while it takes a version."""
    interruption: Literal["recompute", "keep", "drain"] = "recompute"
    """As `weights.interruption`: running answers go on over a cache that is computed anew, over the one they have, or end first."""
    publish_every_steps: int = 1

    def __post_init__(self) -> None:
        at_least(0, stall_s=self.stall_s)
        whole(1, publish_every_steps=self.publish_every_steps)
        if self.interruption not in ("recompute", "keep", "drain"):
            raise ConfigError("interruption", value=self.interruption, allowed="recompute, keep or drain", remedy="Name one of the three.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """Engines die at random, each after `mean_s_between` in the mean; another one serves in its place `restart_s` later.

    What ran on it goes on elsewhere with the tokens it has.
    """

    mean_s_between: float
    restart_s: float

    def __post_init__(self) -> None:
        at_least(0, strictly=True, mean_s_between=self.mean_s_between)
        at_least(0, restart_s=self.restart_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One run to simulate. Raises ConfigError for what cannot run."""

    engines: int
    decoder: Decoder
    trainer: Trainer
    updates: Updates
    buffer: BufferConfig
    """Of its fields those that decide: groups, staleness, policy, window, depth. No reward is simulated, so no group is without one."""
    lengths: Lengths
    prompt_tokens: int
    group_correlation: float = 0.5
    failures: Failures | None = None
    steps: int = 12
    warm_up_steps: int = 4
    """Of them, before anything is measured: the first batches are younger than those of a run under way."""
    seed: int = 0

    def __post_init__(self) -> None:
        whole(1, engines=self.engines, steps=self.steps)
        whole(0, prompt_tokens=self.prompt_tokens, warm_up_steps=self.warm_up_steps)
        if self.warm_up_steps >= self.steps:
            raise ConfigError("warm_up_steps, steps", value=(self.warm_up_steps, self.steps), allowed="a warm-up shorter than the run",
                              remedy="Simulate more steps.")
        longest = self.prompt_tokens + self.lengths.max_tokens
        if longest > self.decoder.kv_pool_tokens:
            raise ConfigError("lengths.max_tokens, decoder.kv_pool_tokens", value=(self.lengths.max_tokens, self.decoder.kv_pool_tokens),
                              allowed=f"a pool of at least {longest} tokens, one prompt and the longest answer",
                              remedy="Give an engine more devices (tensor parallelism), or shorten the answers.")
        check_publish_interval(self.buffer, self.updates.publish_every_steps)
