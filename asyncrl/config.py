"""The configuration of a run: one strict tree of each package's own settings, read from YAML, without torch.

Every section is a tagged union (`kind:`), so an option that would do nothing cannot be written. Paths of functions are
relative to the recipe. `a.b=c` overrides set one value each.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, model_validator

from asyncrl.buffer.config import BufferConfig, check_publish_interval
from asyncrl.errors import ConfigError
from asyncrl.functions import resolve_reference
from asyncrl.rollout.config import EngineConfig, SamplingConfig
from asyncrl.rollout.task_config import EnvConfig, EvalConfig, NoEval, ProbeConfig, PromptsConfig
from asyncrl.settings import Section, validated
from asyncrl.train.config import AdvantagesConfig, CorrectionConfig, LossConfig, TrainConfig, TrainerConfig
from asyncrl.train.prepare_config import ModelConfig, NoWarmUp, WarmUpConfig
from asyncrl.weights.config import WeightsConfig


class NoWandb(Section):
    """Metrics go to `metrics.jsonl` and the console alone."""

    kind: Literal["none"] = "none"


class Wandb(Section):
    """Metrics go to Weights & Biases too; offline when no key is set."""

    kind: Literal["wandb"]
    project: str = "asyncrl"


class RunSection(Section):
    """What is neither model, data nor algorithm."""

    name: str = Field(min_length=1)
    """The run writes to `folder/name`."""
    steps: int = Field(ge=1)
    seed: int = 0
    folder: str = "runs"
    probe: ProbeConfig = ProbeConfig()
    error_budget: float = Field(default=0.5, ge=0, lt=1)
    """Share of the newest 64 rollouts that may fail, of the whole run and of each source; one failure more ends the run. A failed rollout
    is counted and left out either way."""
    rollouts_every_steps: int = Field(default=20, ge=1)
    """How often one group is written to rollouts.jsonl: text, tokens, logprobs, versions, mask."""
    wandb: Annotated[NoWandb | Wandb, Field(discriminator="kind")] = NoWandb()

    @model_validator(mode="after")
    def _name_stays_in_the_folder(self) -> RunSection:
        if {"", ".", ".."} & set(self.name.split("/")):
            raise ConfigError("run.name", value=self.name, allowed="a name below run.folder", remedy="Set run.folder to write elsewhere.")
        return self


class RunConfig(Section):
    """A whole run."""

    model: ModelConfig
    warm_up: WarmUpConfig = NoWarmUp()
    prompts: PromptsConfig
    engine: EngineConfig
    sampling: SamplingConfig = SamplingConfig()
    env: EnvConfig
    buffer: BufferConfig
    advantages: AdvantagesConfig
    correction: CorrectionConfig | None = None
    """Left out, it is an error as soon as the data can be stale."""
    loss: LossConfig
    trainer: TrainerConfig
    weights: WeightsConfig = WeightsConfig()
    eval: EvalConfig = NoEval()
    run: RunSection

    @model_validator(mode="after")
    def _pairs(self) -> RunConfig:
        check_pairs(buffer=self.buffer, correction=self.correction, weights=self.weights, trainer=self.trainer)
        check_publish_interval(self.buffer, self.weights.publish_every_steps)
        TrainConfig(trainer=self.trainer, advantages=self.advantages, correction=self.correction, loss=self.loss)
        self.sampling.build().check(for_training=True)
        return self


def check_pairs(*, buffer: BufferConfig, correction: object | None, weights: WeightsConfig, trainer: TrainerConfig) -> None:
    """Raise ConfigError for sections that are fine alone and wrong together."""
    stale = buffer.max_staleness > 0 or buffer.policy.kind == "soft"
    if stale and correction is None:
        raise ConfigError("correction, buffer.max_staleness", value=f"unset with max_staleness {buffer.max_staleness}",
                          allowed="a chosen correction whenever data can be stale",
                          remedy="Set correction: {kind: token_tis}, or choose {kind: none} knowing that the gradient is biased.")
    if buffer.policy.kind == "fixed_lag" and weights.interruption != "drain":
        raise ConfigError("weights.interruption, buffer.policy", value=f"{weights.interruption} with fixed_lag",
                          allowed="drain with fixed_lag",
                          remedy="An update inside a rollout would mix lags; set weights.interruption=drain.")
    if trainer.minibatches_per_step > buffer.groups_per_step:
        raise ConfigError("trainer.minibatches_per_step, buffer.groups_per_step",
                          value=(trainer.minibatches_per_step, buffer.groups_per_step), allowed="no more minibatches than groups",
                          remedy="A minibatch holds whole groups; ask for fewer, or for more epochs.")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The run a YAML file describes, with `a.b=c` overrides. Raises ConfigError with the field and its nearest neighbour."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError("recipe", value=str(path), allowed="an existing YAML file", remedy="Check the path.")
    try:
        tree = yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError("recipe", value=str(path), allowed="valid YAML", remedy=str(error)) from error
    if not isinstance(tree, dict):
        raise ConfigError("recipe", value=type(tree).__name__, allowed="a mapping of sections",
                          remedy="See recipes/arithmetic/quickstart.yaml.")
    for override in overrides:
        _override(tree, override)
    return parse_config(tree, base=file.parent)


def parse_config(tree: dict[str, Any], *, base: Path) -> RunConfig:
    """The run a plain tree describes; functions are looked for beside `base`."""
    tree = _resolve_functions(tree, base=base, path="")
    return validated(RunConfig, tree)


def dump_config(config: RunConfig) -> str:
    """The resolved configuration as YAML; `load_config` reads it back."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
_FLOAT = "tag:yaml.org,2002:float"
_FUNCTION_KEYS = frozenset({"function", "reward", "examples", "held_out"})
_ARGUMENTS = "arguments"
"""What lies below it is the user's own, whatever its keys are called."""


class _Loader(yaml.SafeLoader):
    """Reads 1e-4 as the number it is (YAML 1.1 takes it for text), and refuses a key written twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        twice = sorted({str(key) for key in keys if keys.count(key) > 1})
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"written twice: {', '.join(twice)}", node.start_mark)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` would read as a number."""


_Loader.add_implicit_resolver(_FLOAT, _EXPONENT, list("-+0123456789"))
_Dumper.add_implicit_resolver(_FLOAT, _EXPONENT, list("-+0123456789"))


def _resolve_functions(node: Any, *, base: Path, path: str) -> Any:
    if not isinstance(node, dict):
        return node
    return {key: value if key == _ARGUMENTS else _resolve_references(value, base=base, field=f"{path}{key}") if key in _FUNCTION_KEYS
            else _resolve_functions(value, base=base, path=f"{path}{key}.") for key, value in node.items()}


def _resolve_references(value: Any, *, base: Path, field: str) -> Any:
    """One reference, or several by name; what is neither is left for the model to refuse."""
    if isinstance(value, dict):
        return {name: _resolve_references(reference, base=base, field=f"{field}.{name}") for name, reference in value.items()}
    return resolve_reference(value, base=base, field=field) if isinstance(value, str) else value


def _override(tree: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise ConfigError("override", value=override, allowed="section.key=value", remedy="For example trainer.learning_rate=1e-4.")
    node = tree
    *parents, leaf = path.split(".")
    for key in parents:
        child = node.setdefault(key, {})
        if not isinstance(child, dict):
            raise ConfigError(path, value=override, allowed="a path through sections", remedy=f"{key} is a value, not a section.")
        node = child
    try:
        node[leaf] = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(path, value=text, allowed="a YAML value", remedy=f"Quote it, or mend it: {error}.") from error
