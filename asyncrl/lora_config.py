"""Settings of low-rank adapters, which trainer and engines must have alike. Needs no torch."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from asyncrl.errors import ConfigError
from asyncrl.settings import TAGGED, Section, Seed, require_pattern, validated

ALL_LINEAR = "all_linear"
"""Every linear layer but the head."""


class NoLoRA(Section):
    """All weights of the model are trained."""

    kind: Literal["none"] = "none"


class LoRA(Section):
    """Low-rank adapters (2106.09685): the model is frozen, and beside each chosen linear layer scale · B · A is trained, A [rank, in] and
    B [out, rank]. They have no dropout: the policy that samples has none."""

    kind: Literal["lora"] = "lora"
    rank: int = Field(ge=1, le=512)
    """Of A and B; 512 is the most that vLLM takes."""
    alpha: float = Field(default=32.0, gt=0, le=10_000)
    """scale = alpha / rank. With 32 the best learning rate hardly depends on the rank, and is about ten times that of full training
    (Schulman et al., LoRA Without Regret, 2025)."""
    rslora: bool = False
    """scale = alpha / √rank instead (2312.03732)."""
    targets: tuple[str, ...] = Field(default=(ALL_LINEAR,), min_length=1)
    """Which linear layers: `all_linear`, or regular expressions for the end of a layer's name from a dot on, such as `q_proj` or
    `layers\\.[0-3]\\.mlp\\..*`. Never the head or the embeddings."""
    seed: Seed = 0
    """Of the first values of A. B begins at 0, so the first policy is the model."""
    export_adapters: bool = False
    """Exports hold merged weights, which any reader takes; this adds `adapter/`, the adapters alone, as PeftModel reads them."""

    @model_validator(mode="before")
    @classmethod
    def _no_dropout(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and "dropout" in given:
            raise ConfigError("lora.dropout", value=given["dropout"], allowed="adapters without dropout",
                              remedy="Remove it: the engines sample without, and the ratio would be of two different policies.")
        return given

    @model_validator(mode="after")
    def _targets_can_be_read(self) -> LoRA:
        for target in self.targets:
            require_pattern(target, field="lora.targets", allowed=f"{ALL_LINEAR}, or regular expressions")
        return self

    @property
    def scale(self) -> float:
        """What B · A is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def shape(self) -> tuple[object, ...]:
        """What two parties must have in common to compute the same from the same adapters."""
        return self.rank, self.alpha, self.rslora, self.targets


LoRAConfig = Annotated[NoLoRA | LoRA, TAGGED]
NO_LORA = NoLoRA()


def adapters_of(section: NoLoRA | LoRA) -> LoRA | None:
    """The adapters that a section asks for, None for none."""
    return section if isinstance(section, LoRA) else None


class _Given(Section):
    lora: LoRAConfig


def read_lora(given: Any) -> LoRA | None:
    """Adapters as a script names them: a section, or a mapping with `kind`. Raises ConfigError, also without peft."""
    adapters = adapters_of(validated(_Given, {"lora": given}).lora)
    if adapters:
        require_peft()
    return adapters


def require_peft() -> None:
    """Raise ConfigError when peft, which makes the adapters, is not installed. Imports nothing."""
    for package in ("peft", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError("lora.kind", value="lora", allowed=f"none, unless {package} is installed",
                              remedy="pip install -c constraints.txt peft accelerate: peft makes the adapters, and imports accelerate.")
