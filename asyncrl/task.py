"""From the sections of a configuration that say what is asked, how it is sampled and judged, to the parts of a run."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.functions import load_function
from asyncrl.rollout.by_source import Samplings
from asyncrl.rollout.data_config import DataSettings
from asyncrl.rollout.data_set import Data
from asyncrl.rollout.env import Env, SingleTurn
from asyncrl.rollout.eval_set import EvalSet
from asyncrl.rollout.prompt_rows import read_jsonl
from asyncrl.rollout.prompts import Mixture, PromptSource
from asyncrl.rollout.task_config import EvalSetConfig, FunctionData, JsonlData, MixturePrompts, SetsEval, SingleTurnConfig
from asyncrl.types import Prompt

_MOST_HELD_OUT = 10_000


def build_prompts(config: RunConfig) -> PromptSource:
    """The training prompts, shuffled by the run's seed."""
    prompts, seed = config.prompts, config.run.seed
    if not isinstance(prompts, MixturePrompts):
        return PromptSource(_data(prompts, field="prompts", source="train"), seed=seed, **_order(prompts))
    sources = {}
    for name, source in prompts.sources.items():
        with placed(f"prompts.sources.{name}") as field:
            sources[name] = PromptSource(_data(source, field=field, source=name), seed=seed, **_order(source))
    return Mixture(sources, weights={name: source.weight for name, source in prompts.sources.items()})


def build_env(config: RunConfig, *, others: Iterable[str]) -> Env | dict[str, Env]:
    """The environment, or one by source when a source of the mixture has its own. `others`: sources of prompts beside the mixture."""
    envs = {field: _single_turn(section, field=field) for field, section in _training_envs(config).items()}
    if len(envs) == 1:
        return envs["env"]
    return {source: envs.get(_env_field(source), envs["env"]) for source in (*others, *_sources(config))}


def build_sampling(config: RunConfig, *, others: Iterable[str]) -> Samplings:
    """The sampling, or one by source, as `build_env` does."""
    default = config.sampling.build()
    own = {name: source.sampling.over(default) for name, source in _sources(config).items() if source.sampling.is_set}
    return dict.fromkeys((*others, *_sources(config)), default) | own if own else default


def build_eval_sets(config: RunConfig) -> tuple[EvalSet, ...]:
    """The held-out sets with their prompts, up to the limit of each. A set that says nothing of sampling, or of its environment, is
    sampled, or judged, as training is."""
    return tuple(_eval_set(config, name, asked) for name, asked in eval_sections(config).items())


def held_out(prompts: Iterable[Prompt], *, name: str, limit: int | None) -> tuple[Prompt, ...]:
    """The prompts of a set, up to its limit. Raises ConfigError without one for data that go on and on: no part is chosen in silence."""
    taken = tuple(itertools.islice(prompts, _MOST_HELD_OUT + 1 if limit is None else limit))
    if limit is None and len(taken) > _MOST_HELD_OUT:
        raise ConfigError(f"eval.sets.{name}.limit", value=None, allowed=f"a number, for data of more than {_MOST_HELD_OUT:,} prompts",
                          remedy="Set it to how many should be asked at every evaluation.")
    return taken


def prompt_sections(config: RunConfig) -> dict[str, FunctionData | JsonlData]:
    """The sections that give training prompts, by field; the last part of a source's is its name."""
    sources = {f"prompts.sources.{name}": source for name, source in _sources(config).items()}
    return sources if isinstance(config.prompts, MixturePrompts) else {"prompts": config.prompts}


def eval_sections(config: RunConfig) -> Mapping[str, EvalSetConfig]:
    """The held-out sets by name."""
    return config.eval.sets if isinstance(config.eval, SetsEval) else {}


def env_sections(config: RunConfig) -> dict[str, SingleTurnConfig]:
    """The environments by field: the run's, and those of sources and held-out sets that have one of their own."""
    return _training_envs(config) | {_eval_env_field(name): asked.env.over(config.env)
                                     for name, asked in eval_sections(config).items() if asked.env.is_set}


def reward_workers(config: RunConfig) -> int:
    """The most reward workers there can be."""
    return sum(section.workers for section in env_sections(config).values())


def most_new_tokens(config: RunConfig) -> int:
    """Of a completion that is trained on, whatever the source of its prompt."""
    return max(sampling.max_new_tokens or 0 for sampling in (config.sampling, *(source.sampling for source in _sources(config).values())))


def load_rewards(config: SingleTurnConfig, *, field: str) -> Callable[..., Any] | dict[str, Callable[..., Any]]:
    """The reward function, or several by name. Raises ConfigError for one that cannot be imported."""
    if isinstance(config.reward, str):
        return load_function(config.reward, field=f"{field}.reward")
    return {name: load_function(reference, field=f"{field}.reward.{name}") for name, reference in config.reward.items()}


@contextlib.contextmanager
def placed(field: str) -> Iterator[str]:
    """What is refused of `prompts` inside is refused of `field`, where a user wrote it."""
    try:
        yield field
    except ConfigError as error:
        raise (error if error.field.startswith(field) else error.moved("prompts", field)) from error


def _data(config: FunctionData | JsonlData, *, field: str, source: str) -> Data:
    """The prompts a section describes, or the call that gives them; `source` names those of a file, a function names its own."""
    if isinstance(config, JsonlData):
        return read_jsonl(Path(config.path), source=source)
    return functools.partial(load_function(config.function, field=f"{field}.function"), **config.arguments)


def _made(config: FunctionData | JsonlData, *, field: str, source: str) -> Iterable[Prompt]:
    data = _data(config, field=field, source=source)
    return data() if callable(data) else data


def _training_envs(config: RunConfig) -> dict[str, SingleTurnConfig]:
    return {"env": config.env} | {_env_field(name): source.env.over(config.env)
                                  for name, source in _sources(config).items() if source.env.is_set}


def _eval_set(config: RunConfig, name: str, asked: EvalSetConfig) -> EvalSet:
    with placed(f"eval.sets.{name}.prompts") as field:
        prompts = held_out(_made(asked.prompts, field=field, source=name), name=name, limit=asked.limit)
    return EvalSet(name, prompts, samples_per_prompt=asked.samples_per_prompt, pass_at=asked.pass_at,
                   success_reward=asked.success_reward,
                   sampling=asked.sampling.over(config.sampling.build()) if asked.sampling.is_set else None,
                   env=_single_turn(asked.env.over(config.env), field=_eval_env_field(name)) if asked.env.is_set else None)


def _sources(config: RunConfig) -> Mapping[str, Any]:
    return config.prompts.sources if isinstance(config.prompts, MixturePrompts) else {}


def _env_field(source: str) -> str:
    return f"prompts.sources.{source}.env"


def _eval_env_field(name: str) -> str:
    return f"eval.sets.{name}.env"


def _order(config: DataSettings) -> dict[str, Any]:
    return {name: getattr(config, name) for name in DataSettings.model_fields}


def _single_turn(config: SingleTurnConfig, *, field: str) -> SingleTurn:
    return SingleTurn(load_rewards(config, field=field), workers=config.workers, timeout_s=config.timeout_s,
                      memory_bytes=config.memory_bytes)
