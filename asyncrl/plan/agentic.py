"""Rollouts of many turns with an environment: sandboxes, CPU time, prefill by what stays in the cache, decode that fits it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from asyncrl.errors import ConfigError
from asyncrl.plan.checks import at_least, whole
from asyncrl.plan.decode import decode_step_s, kv_pool_bytes
from asyncrl.plan.hardware import Hardware
from asyncrl.plan.models import ModelShape
from asyncrl.plan.workload import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class AgenticWorkload:
    """A step of multi-turn rollouts that has to be done within a window."""

    tasks: int
    group_size: int
    turns: int
    generated_tokens: float
    """Sampled in a turn."""
    environment_tokens: float
    """Of the environment's answer."""
    generation_s: float
    """Of a turn, where a sandbox waits."""
    environment_s: float
    """Of a turn, where the sandbox works."""
    cores: float
    final_context_tokens: float
    mean_context_tokens: float
    """Over the turns of a rollout."""
    window_s: float
    gpus: int

    def __post_init__(self) -> None:
        whole(1, tasks=self.tasks, group_size=self.group_size, turns=self.turns, gpus=self.gpus)
        at_least(0, environment_tokens=self.environment_tokens, generation_s=self.generation_s, environment_s=self.environment_s,
                 cores=self.cores)
        at_least(0, strictly=True, generated_tokens=self.generated_tokens, final_context_tokens=self.final_context_tokens,
                 mean_context_tokens=self.mean_context_tokens, window_s=self.window_s)

    @property
    def rollouts(self) -> int:
        """tasks × group_size."""
        return self.tasks * self.group_size

    @property
    def environment_runs(self) -> int:
        """Container runs of a step: one a turn."""
        return self.rollouts * self.turns

    @property
    def cpu_h(self) -> float:
        """Of all sandboxes, while they work."""
        return self.environment_runs * self.environment_s * self.cores / 3600

    @property
    def environment_frac(self) -> float:
        """Share of a turn's tokens that the environment wrote: no loss on them."""
        return self.environment_tokens / (self.environment_tokens + self.generated_tokens)

    @property
    def releasable_sandboxes(self) -> float:
        """At once, given back while the policy writes: runs · environment_s / window (Little's law)."""
        return self.environment_runs * self.environment_s / self.window_s

    @property
    def stateful_sandboxes(self) -> float:
        """At once, held for a rollout's whole life: rollouts · turns · (generation + environment) / window."""
        return self.rollouts * self.turns * (self.generation_s + self.environment_s) / self.window_s


@dataclass(frozen=True, slots=True, kw_only=True)
class AgenticDecode:
    """Decode at a concurrency whose contexts fit the KV cache."""

    concurrency: int
    """Sequences of an engine."""
    step_s: float
    tokens_s_per_gpu: float
    total_s: float
    """Of all sampled tokens of the step."""


def agentic_decode(model: ModelShape, *, hardware: Hardware, workload: AgenticWorkload, placement: Placement) -> AgenticDecode:
    """c = ⌊pool/(ctx·κ)⌋ contexts of the mean length fit; the rate is c/t_step, of an engine, over its GPUs.

    More contexts would be evicted between turns; raises ConfigError when not one fits.
    """
    pool = kv_pool_bytes(model, hardware=hardware, placement=placement)
    fits = math.floor(pool / (workload.mean_context_tokens * model.kv_token_bytes))
    if fits < 1:
        raise ConfigError("tensor_parallel", value=placement.tensor_parallel,
                          allowed=f"a KV cache that holds a context of {workload.mean_context_tokens:.0f} tokens",
                          remedy="Raise tensor_parallel, or shorten what the environment says.")
    step_s = decode_step_s(model, hardware=hardware, tensor_parallel=placement.tensor_parallel, concurrency=fits,
                           context_tokens=workload.mean_context_tokens)
    rate = fits / step_s / placement.tensor_parallel
    return AgenticDecode(concurrency=fits, step_s=step_s, tokens_s_per_gpu=rate, total_s=decode_s(workload, tokens_s_per_gpu=rate))


def decode_s(workload: AgenticWorkload, *, tokens_s_per_gpu: float) -> float:
    """All sampled tokens of a step at this rate on all GPUs."""
    at_least(0, strictly=True, tokens_s_per_gpu=tokens_s_per_gpu)
    return workload.environment_runs * workload.generated_tokens / (workload.gpus * tokens_s_per_gpu)


def agentic_prefill_s(model: ModelShape, *, hardware: Hardware, workload: AgenticWorkload, resident_frac: float) -> float:
    """Prefill of a step: with every turn's context still cached each token is computed once, 2N·rollouts·final context (linear in turns);
    with none of them every turn computes its whole context, 2N·rollouts·turns·mean context (quadratic). Between them by the share."""
    at_least(0, resident_frac=resident_frac)
    if resident_frac > 1:
        raise ConfigError("resident_frac", value=resident_frac, allowed="a share of at most 1", remedy="Give 0.5 for half of the contexts.")
    hit = workload.rollouts * workload.final_context_tokens
    miss = workload.rollouts * workload.turns * workload.mean_context_tokens
    tokens = hit + (1.0 - resident_frac) * (miss - hit)
    return 2.0 * model.active_params * tokens / (workload.gpus * hardware.peak_flop_s * hardware.efficiencies.forward_mfu)


def resident_frac(model: ModelShape, *, workload: AgenticWorkload, pool_bytes_per_gpu: float) -> float:
    """Share of the rollouts' mean contexts that a GPU's KV cache keeps between turns."""
    needed = workload.rollouts / workload.gpus * workload.mean_context_tokens * model.kv_token_bytes
    return min(1.0, pool_bytes_per_gpu / needed)


def agentic_train_flop(model: ModelShape, *, workload: AgenticWorkload) -> float:
    """10N·T: two forwards and training over all tokens, the environment's too. Nobody decodes those, so it is not 12N."""
    return 10.0 * model.active_params * workload.rollouts * workload.final_context_tokens
