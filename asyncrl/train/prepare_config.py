"""Configuration of what happens before the first rollout: the model folder, and the warm-up."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from asyncrl.settings import TAGGED, Section, Seed, Workers
from asyncrl.train.optimizer_config import Betas, LearningRate


class ModelFolder(Section):
    """A Hugging Face folder: config.json, safetensors, tokenizer.json."""

    kind: Literal["folder"] = "folder"
    path: str = Field(min_length=1)
    """Looked for beside the recipe, then in the working folder; from the command line in the working folder alone. Or, without a
    warm-up, a Hugging Face id."""


class ModelFunction(Section):
    """A folder that a function writes: `function(folder: Path, **arguments)`. Made once and cached."""

    kind: Literal["function"]
    function: str
    """`file.py:name` beside the recipe, or `module:name`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Given to the function by name."""


ModelConfig = Annotated[ModelFolder | ModelFunction, TAGGED]


class NoWarmUp(Section):
    """RL starts from the model as it is."""

    kind: Literal["none"] = "none"


class CrossEntropyWarmUp(Section):
    """Cross-entropy on worked examples until the model is good enough to earn rewards. Cached by everything it depends on."""

    kind: Literal["cross_entropy"]
    examples: str
    """`file.py:name` of a function `(seed, **arguments) -> Iterator[tuple[prompt text, completion text]]`, endless."""
    held_out: str
    """The same, finite: the set `until_accuracy` is measured on."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Given to both functions by name."""
    until_accuracy: float = Field(gt=0, lt=1)
    """Stop when sampling at temperature 1 would write the held-out completion exactly, with this mean probability."""
    batch_size: int = Field(default=256, ge=1)
    """Examples of one step."""
    learning_rate: LearningRate = 3e-3
    """Of AdamW, after the ramp."""
    betas: Betas = (0.9, 0.95)
    """Of AdamW."""
    ramp_steps: int = Field(default=20, ge=0)
    """Steps over which the learning rate rises to its value."""
    check_every_steps: int = Field(default=5, ge=1)
    """How often the accuracy is measured; also after the last step."""
    max_steps: int = Field(default=3000, ge=1)
    """A model that is not good enough after so many ends the run."""
    threads: Workers = 2
    """CPU threads of the child that does it."""
    seed: Seed = 0
    """Given to both functions, and to torch."""


WarmUpConfig = Annotated[NoWarmUp | CrossEntropyWarmUp, TAGGED]
