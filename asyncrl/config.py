"""The configuration of a run: one strict tree of each package's own settings, read from YAML, without torch.

A section with alternatives is a tagged union (`kind:`), so an option that would do nothing cannot be written. What a recipe names
lies beside it; what the command line names, in the working folder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from asyncrl import yaml_text
from asyncrl.buffer.config import BufferConfig
from asyncrl.colocation_config import ColocationConfig, NoColocation
from asyncrl.errors import ConfigError
from asyncrl.lora_config import NO_LORA, LoRAConfig
from asyncrl.overrides import apply_overrides, parse_overrides
from asyncrl.pairs import (
    check_colocation,
    check_critic,
    check_deadline,
    check_deterministic,
    check_engine,
    check_evaluation,
    check_mixture,
    check_overlong,
    check_pairs,
    check_push,
    check_routing_replay,
)
from asyncrl.recipe_files import find_recipe
from asyncrl.references import resolve_references
from asyncrl.rollout.config import EngineConfig, SamplingConfig
from asyncrl.rollout.task_config import EnvConfig, EvalConfig, MixturePrompts, NoEval, ProbeConfig, PromptsConfig, SetsEval
from asyncrl.settings import TAGGED, Section, Seed, validated
from asyncrl.train.advantages_config import AdvantagesConfig
from asyncrl.train.config import TrainConfig, TrainerConfig
from asyncrl.train.correction_config import CorrectionConfig
from asyncrl.train.loss_config import LossConfig
from asyncrl.train.prepare_config import ModelConfig, NoWarmUp, WarmUpConfig
from asyncrl.train.reference_config import NoReference, ReferenceConfig
from asyncrl.weights.config import WeightsConfig


class NoWandb(Section):
    """Metrics go to `metrics.jsonl` and the console alone."""

    kind: Literal["none"] = "none"


class Wandb(Section):
    """Metrics go to Weights & Biases too; offline when no key is set."""

    kind: Literal["wandb"]
    project: str = Field(default="asyncrl", min_length=1)
    """The project the run appears in; its name there is `run.name`."""


class RunSection(Section):
    """What is neither model, data nor algorithm."""

    name: str = Field(min_length=1)
    """The run writes to `folder/name`; an earlier run there is kept as `name.1`, `name.2`, …"""
    steps: int = Field(ge=1)
    """Batches to train on. Fewer when the prompts end."""
    seed: Seed = 0
    """Of sampling, shuffles and the engine's random stream; functions that make data, and the warm-up, have seeds of their own."""
    folder: str = Field(default="runs", min_length=1)
    """Relative to the working folder. Prepared models are cached in it, for all its runs."""
    deterministic: bool = False
    """Two runs on one machine give the same bits. Needs the engine inline, and max_staleness 0 or the policy fixed_lag; each group is
    sampled apart. docs/determinism.md says what is promised, and what it costs."""
    probe: ProbeConfig = ProbeConfig()
    """Whether engine and trainer agree, asked again and again."""
    error_budget: float = Field(default=0.5, ge=0, lt=1)
    """Share of the newest 64 rollouts that may fail, of the whole run and of each source; one failure more ends the run. A failed rollout
    is counted and left out either way."""
    rollouts_every_steps: int = Field(default=20, ge=1)
    """How often one group is written to rollouts.jsonl: text, tokens, logprobs, versions, mask."""
    wandb: Annotated[NoWandb | Wandb, TAGGED] = NoWandb()
    """An experiment tracker beside the run's own files."""

    @model_validator(mode="after")
    def _name_stays_in_the_folder(self) -> RunSection:
        if not self.name.isprintable() or any(part == "" or part.startswith(".") for part in self.name.split("/")):
            raise ConfigError("run.name", value=self.name, allowed="a name below run.folder, of letters and signs that can be shown, no "
                              "part of it empty or hidden", remedy="Set run.folder to write elsewhere.")
        if not self.folder.isprintable():
            raise ConfigError("run.folder", value=self.folder, allowed="a path of letters and signs that can be shown",
                              remedy="Rename the folder.")
        return self


class RunConfig(Section):
    """A whole run."""

    model: ModelConfig
    """The model that is trained."""
    warm_up: WarmUpConfig = NoWarmUp()
    """Supervised training before the first rollout."""
    prompts: PromptsConfig
    """What is asked."""
    engine: EngineConfig
    """What writes the answers."""
    sampling: SamplingConfig = SamplingConfig()
    """How it writes them."""
    env: EnvConfig
    """What an answer earns."""
    buffer: BufferConfig
    """What a batch is, and how old its data may be."""
    advantages: AdvantagesConfig
    """What a rollout is compared with."""
    correction: CorrectionConfig | None = None
    """How data written by an older policy is weighed. Left out, it is an error as soon as the data can be stale."""
    loss: LossConfig
    """What is minimised."""
    reference: ReferenceConfig = NoReference()
    """Whether the policy is held to the model it started from."""
    trainer: TrainerConfig
    """How it is minimised, and by how many processes."""
    lora: LoRAConfig = NO_LORA
    """Whether the model's own weights are trained, or low-rank adapters beside them, which the engine then has too."""
    weights: WeightsConfig = WeightsConfig()
    """How the engine gets what was learnt."""
    colocation: ColocationConfig = NoColocation()
    """Whether engine and trainer share a device, each with its memory in turn."""
    eval: EvalConfig = NoEval()
    """What is asked beside the training."""
    run: RunSection
    """How long, and where to."""

    @property
    def training(self) -> TrainConfig:
        """What a trainer rank needs to know, of the sections here. Raises ConfigError where they contradict one another."""
        return TrainConfig(trainer=self.trainer, advantages=self.advantages, correction=self.correction, loss=self.loss,
                           reference=self.reference, lora=self.lora)

    @model_validator(mode="after")
    def _pairs(self) -> RunConfig:
        check_pairs(buffer=self.buffer, training=self.training, weights=self.weights)
        sampling = self.sampling.build()
        sampling.check(for_training=True, kept_sets=True)  # check_engine asks the engine for them
        check_engine(self.engine, sampling=sampling, weights=self.weights, lora=self.lora)
        check_routing_replay(self.training, engines={self.engine.kind: self.engine.capabilities(context_tokens=0)})
        check_deadline(self.env, buffer=self.buffer)
        check_overlong(self.advantages, prompts=self.prompts, sampling=sampling)
        check_critic(self.advantages, steps=self.run.steps)
        engines = {self.engine.kind: self.engine.capabilities(context_tokens=0)}
        check_colocation(self.colocation, buffer=self.buffer, weights=self.weights, engines=engines)
        check_push(self.weights, engines=engines, processes=self.trainer.processes, colocation=self.colocation)
        if self.run.deterministic:
            check_deterministic(self.buffer, engines=engines,
                                goes_by_rewards=self.prompts.goes_by_rewards)
        if isinstance(self.prompts, MixturePrompts):
            check_mixture(self.prompts, env=self.env, sampling=sampling, engine=self.engine, buffer=self.buffer, weights=self.weights)
        if isinstance(self.eval, SetsEval):
            check_evaluation(self.eval, env=self.env, sampling=sampling, engine=self.engine, buffer=self.buffer, weights=self.weights)
        return self


def load_config(recipe: str | Path, overrides: Sequence[str] = (), *, echo: Callable[[str], None] | None = None) -> RunConfig:
    """The run that a YAML file, or a recipe of the library by name, describes, with `a.b=c` overrides.

    Args:
        echo: told, a line each, which settings of the recipe an override takes with it, such as another kind of engine.

    Raises ConfigError with the field and its nearest neighbour.
    """
    return validated(RunConfig, resolved_tree(find_recipe(recipe), overrides, root=RunConfig, echo=echo))


def resolved_tree(file: Path, overrides: Sequence[str], *, root: type[Section],
                  echo: Callable[[str], None] | None = None) -> dict[str, Any]:
    """The plain tree of a `root` in a file, with overrides, and everything it names made absolute."""
    tree = read_tree(file)
    given = parse_overrides(overrides)
    for line in apply_overrides(tree, given, root=root):
        if echo:
            echo(line)
    return resolve_references(tree, base=file.parent, overridden=[override.path for override in given])


def read_tree(file: Path, *, field: str = "recipe") -> dict[str, Any]:
    """The plain tree in a YAML file. Raises ConfigError, under `field`, for one that cannot be read or holds no mapping."""
    try:
        tree = yaml_text.read(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(field, value=str(file), allowed="a file that can be read", remedy=f"{error}.") from error
    except (yaml_text.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(field, value=str(file), allowed="valid YAML", remedy=str(error)) from error
    if not isinstance(tree, dict):
        raise ConfigError(field, value=type(tree).__name__, allowed="a mapping of sections",
                          remedy="See docs/configuration.md; `asyncrl recipes` lists examples.")
    return tree


def parse_config(tree: dict[str, Any], *, base: Path, overridden: Sequence[str] = ()) -> RunConfig:
    """The run a plain tree describes. Functions and files are looked for beside `base`, those under `overridden` in the working folder."""
    return validated(RunConfig, resolve_references(tree, base=base, overridden=overridden))


def dump_config(config: RunConfig) -> str:
    """The resolved configuration as YAML; `load_config` reads it back."""
    return yaml_text.write(config.model_dump(mode="json"))
