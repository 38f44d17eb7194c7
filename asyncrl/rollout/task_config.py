"""Configuration of the task: where prompts come from, what the environment does, what is evaluated."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from asyncrl.settings import Section


class FunctionData(Section):
    """Prompts that a function yields: `function(**arguments) -> Iterable[Prompt]`."""

    kind: Literal["function"] = "function"
    function: str
    """`file.py:name` beside the recipe, or `module:name`."""
    arguments: dict[str, Any] = Field(default_factory=dict)


class JsonlData(Section):
    """Prompts of a JSONL file: a text or a list of messages under `prompt`, other keys are columns for the reward."""

    kind: Literal["jsonl"]
    path: str


DataConfig = Annotated[FunctionData | JsonlData, Field(discriminator="kind")]


class FunctionPrompts(FunctionData):
    """Training prompts that a function yields."""

    epochs: int | None = Field(default=None, ge=1)
    """How often to go through the data; None as long as the run asks."""


class JsonlPrompts(JsonlData):
    """Training prompts of a JSONL file."""

    epochs: int | None = Field(default=None, ge=1)


PromptsConfig = Annotated[FunctionPrompts | JsonlPrompts, Field(discriminator="kind")]


class SingleTurnConfig(Section):
    """One completion, one judgement in a killable worker."""

    kind: Literal["single_turn"] = "single_turn"
    reward: str | dict[str, str]
    """`file.py:name` or `module:name` of the reward function, or several by name: their sum is the reward, each has a curve of its own."""
    workers: int = Field(default=1, ge=1)
    timeout_s: float = Field(default=10.0, gt=0)
    memory_bytes: int | None = Field(default=None, ge=1)
    """Private memory a reward worker may take beyond what it inherits; None gives the workers half of the memory together."""


EnvConfig = Annotated[SingleTurnConfig, Field()]


class NoEval(Section):
    """Nothing is evaluated."""

    kind: Literal["none"] = "none"


class PromptsEval(Section):
    """A fixed set of prompts, sampled on the run's engines at start, every N steps and at the end, outside the buffer."""

    kind: Literal["prompts"]
    prompts: DataConfig
    every_steps: int = Field(default=25, ge=1)
    limit: int = Field(default=256, ge=1)
    """At most this many prompts of the set."""


EvalConfig = Annotated[NoEval | PromptsEval, Field(discriminator="kind")]


class ProbeConfig(Section):
    """The parity probe: a few rollouts of exactly the trainer's version are scored by the trainer before it steps."""

    every_steps: int = Field(default=50, ge=1)
    prompts: int = Field(default=8, ge=1)
    """How many rollouts are scored."""
    max_mean_gap: float = Field(default=0.02, gt=0)
    """Largest mean |engine logprob − trainer logprob| in nats. Float32 engines that get float32
    weights stay under 1e-4; bfloat16 on either side takes it towards 1e-2."""
