"""Configuration of supervised training, the recipe of `asyncrl sft`. Needs no torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from asyncrl.errors import ConfigError
from asyncrl.lora_config import NO_LORA, LoRAConfig
from asyncrl.settings import TAGGED, Section, Seed
from asyncrl.train.config import TrainerConfig
from asyncrl.train.export_form import ExportDtype
from asyncrl.train.prepare_config import ModelConfig, NoWarmUp

UNREAD = ("minibatches_per_step", "epochs", "record_batches_every_steps", "max_restarts", "learning_rate_scale", "routing_replay")
"""Settings of the trainer that reinforcement learning alone has a use for."""


class JsonlExamples(Section):
    """Rows of a file, an object a line, in any of the shapes of docs/sft.md."""

    kind: Literal["jsonl"]
    path: str = Field(min_length=1)
    """Looked for beside the recipe, then in the working folder."""


class FunctionExamples(Section):
    """Rows that a function gives: `function(seed, **arguments)`, a list, or an iterator, of which `sft.max_steps` takes what it needs."""

    kind: Literal["function"]
    function: str
    """`file.py:name` beside the recipe, or `module:name`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Given to the function by name."""


class NoExamples(Section):
    """Nothing is held out."""

    kind: Literal["none"] = "none"


class SFTSection(Section):
    """How the examples are gone through."""

    batch_size: int = Field(default=32, ge=1)
    """Examples of one update; the last batch may have fewer."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the examples, each in an order of its own."""
    max_steps: int | None = Field(default=None, ge=1)
    """Updates at most. None: as many as the epochs take; examples of an iterator need a number."""
    eval_every_steps: int = Field(default=50, ge=1)
    """How often the loss on held-out examples is measured; also before the first step and after the last."""
    seed: Seed = 0
    """Of the order of the examples; given to functions too."""
    export_dtype: ExportDtype = "source"
    """Of the weights in `model/`."""


class SFTRunSection(Section):
    """Where it goes."""

    name: str = Field(min_length=1)
    """The run writes to `folder/name`; an earlier run there is kept as `name.1`, `name.2`, …"""
    folder: str = Field(default="runs", min_length=1)
    """Relative to the working folder."""
    deterministic: bool = False
    """Only algorithms that give the same bits every time."""


class SFTConfig(Section):
    """A whole supervised run."""

    model: ModelConfig
    """The model that is trained."""
    data: Annotated[JsonlExamples | FunctionExamples, TAGGED]
    """The examples that are learned."""
    eval: Annotated[NoExamples | JsonlExamples | FunctionExamples, TAGGED] = NoExamples()
    """Those the loss is measured on, which are never trained on."""
    sft: SFTSection = SFTSection()
    """How the examples are gone through."""
    lora: LoRAConfig = NO_LORA
    """Whether the model's own weights are trained, or adapters beside them; `model/` has them merged."""
    trainer: TrainerConfig
    """Ranks and optimizer, as in reinforcement learning; a step of the schedule is an update."""
    run: SFTRunSection
    """Where it goes."""

    @property
    def warm_up(self) -> NoWarmUp:
        """None: this is one."""
        return NoWarmUp()


def refuse_settings_of_rl(trainer: TrainerConfig) -> None:
    """Raise ConfigError for a setting that nothing reads where there are no rollouts."""
    for name in UNREAD:
        given, default = getattr(trainer, name), TrainerConfig.model_fields[name].default
        if given != default:
            raise ConfigError(f"trainer.{name}", value=given, allowed=f"its default {default!r} in supervised training: nothing reads it",
                              remedy=f"Remove trainer.{name}; sft.epochs and sft.batch_size say how examples are gone through.")
