"""One held-out set: what is asked, how it is sampled, when an answer counts as right."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from asyncrl.errors import ConfigError
from asyncrl.rollout.engine import Capabilities, Engine, require_sampling
from asyncrl.rollout.env import Env
from asyncrl.rollout.names import check_name, own_source
from asyncrl.rollout.prompt_rows import complete_prompt
from asyncrl.tokenizer import Tokenizer
from asyncrl.types import Prompt, Sampling


@dataclass(frozen=True, slots=True)
class EvalSet:
    """Held-out prompts, asked alike at every evaluation. Raises ConfigError, naming the set."""

    name: str
    """Of its metrics: `eval/NAME/...`."""
    prompts: tuple[Prompt, ...]
    samples_per_prompt: int = 1
    """Rollouts of each prompt: n of pass@k."""
    sampling: Sampling | None = None
    """None: as the run samples. What training refuses is allowed here, where the engine has it."""
    env: Env | None = None
    """None: the run's. One of its own shares the reward zygote with the run's, and its prompts are of the source `eval/NAME`."""
    pass_at: tuple[int, ...] = ()
    """Every k for which pass@k is measured."""
    success_reward: float = 1.0
    """A rollout with at least this reward has solved its prompt."""

    def __post_init__(self) -> None:
        check_name(self.name, field="eval.sets")
        check_pass_at(self.name, pass_at=self.pass_at, samples_per_prompt=self.samples_per_prompt)
        if not self.prompts:
            raise ConfigError(f"eval.sets.{self.name}.prompts", value="no prompt", allowed="at least one prompt: a mean over nothing is "
                              "no reward", remedy="Check the data set, or leave the set out.")

    def completed(self, tokenizer: Tokenizer) -> EvalSet:
        """The same with ids, texts and tokens of the prompts filled in. Raises ConfigError for a prompt that cannot be made whole."""
        try:
            whole = [complete_prompt(prompt, prompt_id=f"eval/{self.name}/{number}", tokenizer=tokenizer)
                     for number, prompt in enumerate(self.prompts)]
        except ConfigError as error:
            raise error.moved("prompts", f"eval.sets.{self.name}.prompts") from error
        if self.env is not None:
            whole = [dataclasses.replace(prompt, source=own_source(self.name)) for prompt in whole]
        return dataclasses.replace(self, prompts=tuple(whole))


def check_sets(sets: Sequence[EvalSet], *, engines: Sequence[Engine]) -> None:
    """Raise ConfigError for sets of one name, and when an engine cannot sample as a set asks."""
    names = [asked.name for asked in sets]
    if len(set(names)) != len(names):
        raise ConfigError("eval.sets", value=names, allowed="sets with names of their own", remedy="Rename one.")
    for asked in sets:
        for engine in engines if asked.sampling is not None else ():
            check_set_sampling(asked.name, asked.sampling, capabilities=engine.capabilities, engine=engine.name)


def check_set_sampling(name: str, sampling: Sampling, *, capabilities: Capabilities, engine: str) -> None:
    """Raise ConfigError, naming the set, when an engine cannot sample as it asks."""
    try:
        sampling.check(for_training=False)
        require_sampling(capabilities, sampling, engine=engine)
    except ConfigError as error:
        raise ConfigError(f"eval.sets.{name}.{error.field}", value=error.value, allowed=error.allowed, remedy=error.remedy) from None


def own_envs(sets: Iterable[EvalSet]) -> dict[str, Env]:
    """Environments of sets that have one of their own, by the source of their prompts."""
    return {own_source(asked.name): asked.env for asked in sets if asked.env is not None}


def sources_of(sets: Iterable[EvalSet]) -> set[str]:
    """Every source that their prompts name."""
    return {prompt.source for asked in sets for prompt in asked.prompts}


def check_pass_at(name: str, *, pass_at: Sequence[int], samples_per_prompt: int) -> None:
    """Raise ConfigError unless every k is between 1 and the number of samples."""
    if samples_per_prompt < 1:
        raise ConfigError(f"eval.sets.{name}.samples_per_prompt", value=samples_per_prompt, allowed="an integer of at least 1",
                          remedy="Say how many rollouts each prompt gets.")
    wrong = [k for k in pass_at if not 1 <= k <= samples_per_prompt]
    if wrong:
        raise ConfigError(f"eval.sets.{name}.pass_at, eval.sets.{name}.samples_per_prompt", value=(wrong[0], samples_per_prompt),
                          allowed="1 <= k <= samples_per_prompt", remedy="pass@k needs at least k samples of each prompt: raise "
                          "samples_per_prompt, or leave out this k.")
