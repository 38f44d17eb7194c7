"""What is asked of the machines: the rollouts of a step, the algorithm that trains on them, and where it all lies."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.errors import ConfigError
from asyncrl.plan.checks import at_least, fraction, whole
from asyncrl.plan.lengths import Lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The rollouts of a step. Of a rollout with turns, `lengths` is what the policy samples in all of them together."""

    prompts: int
    group_size: int
    prompt_tokens: float
    lengths: Lengths
    turns: int = 1
    environment_tokens: float = 0.0
    """What the environment adds to the context in each turn."""
    environment_s: float = 0.0
    """From a turn's last token to the environment's answer."""
    environment_cores: float = 1.0
    """Of a sandbox, while it answers."""

    def __post_init__(self) -> None:
        whole(1, prompts=self.prompts, group_size=self.group_size, turns=self.turns)
        at_least(0, prompt_tokens=self.prompt_tokens, environment_tokens=self.environment_tokens, environment_s=self.environment_s,
                 environment_cores=self.environment_cores)

    @property
    def rollouts(self) -> int:
        """S: prompts × group_size."""
        return self.prompts * self.group_size

    @property
    def response_tokens(self) -> float:
        """Sampled by the policy in a step, T_resp."""
        return self.rollouts * self.lengths.mean_tokens

    @property
    def context_tokens(self) -> float:
        """Beside the answer in a rollout's context at its end: the prompt, and what the environment said."""
        return self.prompt_tokens + self.turns * self.environment_tokens

    @property
    def all_tokens(self) -> float:
        """What forwards and training see in a step, T_all: prompts once a rollout, answers, the environment."""
        return self.rollouts * (self.context_tokens + self.lengths.mean_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """Which passes a step makes over its tokens, in multiples of N·T."""

    reference: bool = True
    """A forward of the initial model, for a KL."""
    proximal: bool = True
    """A forward of the policy over the batch before its first update; "old" logprobs computed again."""
    reward_model: bool = False
    """A forward of a model of the policy's size that scores."""
    critic: bool = False
    """PPO: a critic of the policy's size, one forward and its training."""
    epochs: int = 1
    minibatches: int = 4
    """Updates an epoch."""
    syncs_per_step: int = 1
    """Weight updates of the engines while a step's batch is trained, asynchronously."""
    max_staleness: int = 4
    """So many batches may be in flight beside the one that is trained, asynchronously."""
    async_proximal: bool = True
    """Whether the async shape makes the proximal forward too; without it the rollouts' own logprobs stand for it."""

    def __post_init__(self) -> None:
        whole(0, max_staleness=self.max_staleness)
        whole(1, epochs=self.epochs, minibatches=self.minibatches, syncs_per_step=self.syncs_per_step)

    @property
    def forwards(self) -> int:
        """Passes over all tokens without a gradient."""
        return self.reference + self.proximal + self.reward_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How many devices, and how engines and trainers lie on them."""

    gpus: int
    tensor_parallel: int = 1
    """Devices of an engine."""
    unit_gpus: int = 1
    """Pools are split in multiples of this: an engine, a node."""
    gpu_memory_utilization: float | None = None
    """Share of memory for weights, KV cache and activations together; None: an engine alone on its device."""
    transport: str = "single_source"
    """How engines of their own GPUs get new weights: single_source, multi_source or delta."""
    layout: str = "none"
    """How trainer ranks hold the weights; decides how long a full tensor takes to come together. A name of `sync.LAYOUTS`."""

    def __post_init__(self) -> None:
        whole(1, gpus=self.gpus, tensor_parallel=self.tensor_parallel, unit_gpus=self.unit_gpus)
        if self.gpu_memory_utilization is not None:
            fraction(gpu_memory_utilization=self.gpu_memory_utilization)
        if self.gpus % self.tensor_parallel:
            raise ConfigError("gpus, tensor_parallel", value=(self.gpus, self.tensor_parallel), allowed="engines that divide the GPUs",
                              remedy="Give a multiple of tensor_parallel as gpus.")

    @property
    def engines(self) -> int:
        """Where all devices generate."""
        return self.gpus // self.tensor_parallel
