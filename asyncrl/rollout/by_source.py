"""What may differ between the sources of prompts: the environment, with its rewards, and the sampling."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from asyncrl.errors import ConfigError
from asyncrl.rollout.engine import Engine, Interruption, require
from asyncrl.rollout.env import Env, Outcome, Session, SingleTurn
from asyncrl.tokenizer import Tokenizer
from asyncrl.types import Prompt, Sampling

T = TypeVar("T")

Samplings = Sampling | Mapping[str, Sampling]
"""One for all prompts, or one for each source."""


def of_source(values: Mapping[str, T], source: str, *, field: str) -> T:
    """What a source was given. Raises ConfigError when it was given nothing."""
    if source not in values:
        raise ConfigError(field, value=source, allowed=f"a source it names: {sorted(values)}",
                          remedy=f"A prompt names {source!r} as its source: add it to the mapping.")
    return values[source]


def sampling_of(sampling: Samplings, source: str) -> Sampling:
    """The sampling of prompts of one source. Raises ConfigError when none was given."""
    return sampling if isinstance(sampling, Sampling) else of_source(sampling, source, field="sampling")


def asks_at_once(env: Env, source: str) -> bool:
    """Whether a rollout's first request goes out with no wait before it, and is its only one: so that those of a group come together."""
    if isinstance(env, BySource):
        env = env.of(source)
    return isinstance(env, SingleTurn) and type(env).run is SingleTurn.run


class BySource:
    """An environment for each source of prompts; the same one may stand for several. Reward workers of all have one zygote.

    `Run(env={"sums": SingleTurn(...), "proofs": MyEnv()})` makes it. `otherwise` is the environment of every other source; None
    when there is no other.
    """

    def __init__(self, envs: Mapping[str, Env], *, otherwise: Env | None = None) -> None:
        self._envs, self._otherwise = dict(envs), otherwise
        every = [*envs.values(), *([otherwise] if otherwise is not None else [])]
        self._distinct = list({id(env): env for env in every}.values())

    def of(self, source: str) -> Env:
        """The environment of one source. Raises ConfigError when there is none."""
        env = self._envs.get(source, self._otherwise)
        return of_source(self._envs, source, field="env") if env is None else env

    def start(self, logs: Path, tokenizer: Tokenizer) -> None:
        """Start each environment once."""
        together = [env for env in self._distinct if isinstance(env, SingleTurn) and type(env).start is SingleTurn.start]
        SingleTurn.start_together(together, logs, tokenizer)
        for env in self._distinct:
            if env not in together:
                env.start(logs, tokenizer)

    async def run(self, prompt: Prompt, session: Session) -> Outcome:
        """One rollout in the environment of the prompt's source. Raises ConfigError when there is none, and what that one raises."""
        return await self.of(prompt.source).run(prompt, session)

    async def close(self) -> None:
        """End every worker of every environment."""
        await asyncio.gather(*(env.close() for env in self._distinct))


def joined(env: Env | Mapping[str, Env], *, own: Mapping[str, Env]) -> Env:
    """One environment of what a run was given, one or one by source, and of those that some sources have of their own."""
    if isinstance(env, Mapping):
        return BySource({**env, **own})
    return BySource(own, otherwise=env) if own else env


def check_sources(known: Iterable[str], *, field: str, given: object, others: Iterable[str]) -> None:
    """Raise ConfigError when what was given is a mapping that lacks a source prompts will name, or names one they will not.

    `known` are the sources of a mixture, none when the prompts name their own; `others` those of prompts beside them.
    """
    if not isinstance(given, Mapping):
        return
    mixed = set(known)
    needed = mixed | set(others)
    missing, unknown = sorted(needed - given.keys()), sorted(given.keys() - needed) if mixed else []
    if missing or unknown or not given:
        near = difflib.get_close_matches(unknown[0], missing or sorted(needed), n=1) if unknown else []
        steps = " ".join(f"{verb} {names}." for verb, names in (("Add", missing), ("Remove", unknown)) if names)
        raise ConfigError(field, value=sorted(given), allowed=f"an entry for each source of prompts: {sorted(needed)}",
                          remedy=f"Did you mean {near[0]!r}?" if near else steps or "Add one.")


def check_sampling(sampling: Samplings, *, engines: Iterable[Engine], interruption: Interruption) -> None:
    """Raise ConfigError unless completions sampled so can be trained on, and every engine can sample so."""
    for source, each in {"": sampling}.items() if isinstance(sampling, Sampling) else sampling.items():
        try:
            each.check(for_training=True, kept_sets=True)  # the engines are asked for them below
            for engine in engines:
                require(engine.capabilities, each, interruption, engine=engine.name)
        except ConfigError as error:
            raise error.moved("sampling", f"sampling.{source}" if source else "sampling") from error
    temperatures = {each.temperature for each in sampling.values()} if isinstance(sampling, Mapping) else set()
    for engine in engines:
        if len(temperatures) > 1 and not engine.capabilities.per_request_temperature:
            raise ConfigError("sampling.temperature", value=sorted(temperatures), allowed=f"one for all sources with {engine.name}",
                              remedy="Give every source the same, or choose another engine.")
