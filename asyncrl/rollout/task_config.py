"""Configuration of the task: where prompts come from, what the environment does, what is evaluated."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from asyncrl.errors import ConfigError
from asyncrl.rollout.data_config import DataSettings
from asyncrl.rollout.eval_set import check_pass_at
from asyncrl.rollout.names import check_name
from asyncrl.settings import TAGGED, Seconds, Section, Workers
from asyncrl.types import Sampling


class FunctionData(Section):
    """Prompts that a function yields: `function(**arguments) -> Iterable[Prompt]`."""

    kind: Literal["function"] = "function"
    function: str
    """`file.py:name` beside the recipe, or `module:name`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Given to the function by name."""


class JsonlData(Section):
    """Prompts of a JSONL file: a text or a list of messages under `prompt`, other keys are columns for the reward."""

    kind: Literal["jsonl"]
    path: str = Field(min_length=1)
    """Looked for beside the recipe, then in the working folder; from the command line in the working folder alone."""


DataConfig = Annotated[FunctionData | JsonlData, TAGGED]


class SamplingOverrides(Section):
    """How one source, or one held-out set, is sampled where that differs from the run; left out, as `sampling` says."""

    temperature: float | None = Field(default=None, gt=0.0)
    """Near 0 it is greedy decoding: at 0.01 two tokens share the probability only when their logits are within 0.05."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of one completion."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] | None = None
    """Texts that end a completion."""

    @property
    def is_set(self) -> bool:
        """Whether anything differs."""
        return bool(self.model_dump(exclude_none=True))

    def over(self, sampling: Sampling) -> Sampling:
        """`sampling` with what is set here."""
        return dataclasses.replace(sampling, **self.model_dump(exclude_none=True))


class FunctionPrompts(FunctionData, DataSettings):
    """Training prompts that a function yields. Called again for each epoch, unless it returns a list."""


class JsonlPrompts(JsonlData, DataSettings):
    """Training prompts of a JSONL file."""


class SingleTurnConfig(Section):
    """One completion, one judgement in a killable worker."""

    kind: Literal["single_turn"] = "single_turn"
    reward: str | dict[str, str]
    """`file.py:name` or `module:name` of the reward function, or several by name: their sum is the reward, each has a curve of its own."""
    workers: Workers = 1
    """Processes that judge, each one completion at a time."""
    timeout_s: Seconds = 10.0
    """Deadline of one call of a reward function; the worker that passes it is killed, and the rollout counts as failed."""
    memory_bytes: int | None = Field(default=None, ge=1)
    """Private memory a reward worker may take beyond what it inherits; None gives the workers half of the memory together."""


EnvConfig = Annotated[SingleTurnConfig, Field()]


class SourceEnv(Section):
    """What is judged otherwise than `env` says; left out, as it says."""

    reward: str | dict[str, str] | None = None
    """Of this source, or held-out set, alone."""
    workers: Workers | None = None
    """Reward workers of its own."""
    timeout_s: Seconds | None = None
    """Deadline of one call of a reward function."""
    memory_bytes: int | None = Field(default=None, ge=1)
    """Private memory a reward worker may take beyond what it inherits."""

    @property
    def is_set(self) -> bool:
        """Whether anything differs."""
        return bool(self.model_dump(exclude_none=True))

    def over(self, env: SingleTurnConfig) -> SingleTurnConfig:
        """`env` with what is set here."""
        return env.model_copy(update=self.model_dump(exclude_none=True))


class SourceSettings(DataSettings):
    """One source of a mixture: its share, and what differs for it."""

    weight: float = Field(default=1.0, gt=0)
    """Its share of the prompts, relative to the other sources'."""
    env: SourceEnv = SourceEnv()
    """Rewards, workers and deadline of its own."""
    sampling: SamplingOverrides = SamplingOverrides()
    """Temperature, budget and stop strings of its own."""


class FunctionSource(FunctionData, SourceSettings):
    """Prompts that a function yields; they get the name of the source."""


class JsonlSource(JsonlData, SourceSettings):
    """Prompts of a JSONL file."""


SourceConfig = Annotated[FunctionSource | JsonlSource, TAGGED]


class MixturePrompts(Section):
    """Training prompts of several sources, asked by weight."""

    kind: Literal["mixture"]
    sources: dict[str, SourceConfig] = Field(min_length=1)
    """By the name that their prompts, and their metrics, get."""

    @property
    def goes_by_rewards(self) -> bool:
        """Whether the rewards that have come in decide what is asked next."""
        return any(source.goes_by_rewards for source in self.sources.values())

    @model_validator(mode="after")
    def _names_fit_into_metrics(self) -> MixturePrompts:
        for name in self.sources:
            check_name(name, field="prompts.sources")
        return self


PromptsConfig = Annotated[FunctionPrompts | JsonlPrompts | MixturePrompts, TAGGED]


class NoEval(Section):
    """Nothing is evaluated."""

    kind: Literal["none"] = "none"


class EvalSampling(SamplingOverrides):
    """How a held-out set is sampled: also in ways that training refuses, where the engine has them."""

    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    """Only the likeliest tokens, as many as hold this probability together."""
    top_k: int | None = Field(default=None, ge=1)
    """Only so many of the likeliest tokens."""
    min_p: float | None = Field(default=None, ge=0.0, le=1.0)
    """Only tokens with at least this share of the likeliest one's probability."""


class EvalSetConfig(Section):
    """One held-out set."""

    prompts: DataConfig
    """What is asked; the same prompts every time."""
    limit: int | None = Field(default=None, ge=1, le=1_000_000)
    """At most this many prompts of the data; None: all of them, which may be 10,000."""
    samples_per_prompt: int = Field(default=1, ge=1, le=4096)
    """Rollouts of each prompt, n of pass@k."""
    pass_at: tuple[int, ...] = ()
    """Every k, up to `samples_per_prompt`, for which pass@k is measured."""
    success_reward: float = 1.0
    """A rollout with at least this reward has solved its prompt."""
    sampling: EvalSampling = EvalSampling()
    """Temperature, budget, stop strings and kept set of its own."""
    env: SourceEnv = SourceEnv()
    """Rewards, workers and deadline of its own."""


class NoBest(Section):
    """No weights but the last are kept."""

    kind: Literal["none"] = "none"


class KeepBest(Section):
    """The weights of the best evaluation so far are kept in `best/`."""

    kind: Literal["keep"] = "keep"
    set: str | None = None
    """Which set decides; the first when left out. It is also the one in the summary and the picture."""
    metric: str = "reward"
    """`reward`, or `pass_at_K` for a K of the set's `pass_at`."""


BestConfig = Annotated[NoBest | KeepBest, TAGGED]


class SetsEval(Section):
    """Held-out sets, sampled on the run's engines at start, every N steps and at the end, outside the buffer."""

    kind: Literal["sets"]
    sets: dict[str, EvalSetConfig] = Field(min_length=1)
    """By name: `eval/NAME/reward/mean` and so on."""
    every_steps: int = Field(default=25, ge=1)
    """A multiple of `weights.publish_every_steps`; also at the start and at the end."""
    best: BestConfig = KeepBest()
    """What becomes of the best weights."""

    @property
    def leading(self) -> str:
        """The set that decides which weights are best, and stands in the summary."""
        return getattr(self.best, "set", None) or next(iter(self.sets))

    @model_validator(mode="after")
    def _names_and_metrics_exist(self) -> SetsEval:
        for name, asked in self.sets.items():
            check_name(name, field="eval.sets")
            check_pass_at(name, pass_at=asked.pass_at, samples_per_prompt=asked.samples_per_prompt)
        if isinstance(self.best, KeepBest):
            if self.leading not in self.sets:
                raise ConfigError("eval.best.set", value=self.leading, allowed=f"one of the sets {list(self.sets)}", remedy="Choose one.")
            metrics = ["reward", *(f"pass_at_{k}" for k in self.sets[self.leading].pass_at)]
            if self.best.metric not in metrics:
                raise ConfigError("eval.best.metric", value=self.best.metric, allowed=f"one of {metrics}, what {self.leading} measures",
                                  remedy="Choose one, or add the k to pass_at of the set.")
        return self


EvalConfig = Annotated[NoEval | SetsEval, TAGGED]


class ProbeConfig(Section):
    """The parity probe: a few rollouts of exactly the trainer's version are scored by the trainer before it steps."""

    every_steps: int = Field(default=50, ge=1)
    """How often; the first time before the first step."""
    prompts: int = Field(default=8, ge=1, le=1024)
    """How many rollouts are scored."""
    max_mean_gap: float = Field(default=0.02, gt=0)
    """Largest mean |engine logprob − trainer logprob| in nats. Float32 engines that get float32
    weights stay under 1e-4; bfloat16 on either side takes it towards 1e-2."""
