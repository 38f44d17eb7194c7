"""Settings of how the forward and its gradient are computed: attention, memory, sharding. Needs no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from asyncrl.errors import ConfigError
from asyncrl.settings import Section


class ShardingConfig(Section):
    """How FSDP2 cuts the model over the ranks; of ranks that are children alone."""

    prefetch_layers: int = Field(default=1, ge=0, le=16)
    """Layers that are gathered ahead of the one that computes, forward and backward; each costs the memory of one layer. 0: as torch
    does it by itself, which asks for the next layer once the work of this one is queued."""
    reshard_after_forward: bool = True
    """A layer's whole weights are given up after its forward and gathered again for its backward; without, they stay: one gathering
    less, and the memory of the whole model in the dtype that computes."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of gradients on their way between ranks; bfloat16 halves what travels, and rounds each sum."""


class ParallelConfig(Section):
    """Which attention, what is kept for the backward pass, what is compiled, and what is cut over ranks."""

    attention: Literal["auto", "sdpa", "flex", "flash"] = "auto"
    """`sdpa`: sequence after sequence, anywhere; `flex`: one kernel over the packed row, on a GPU; `flash`: flash-attn's, on a GPU in
    bfloat16, where flash-attn is installed. `auto`: `flash` where it can be, else `flex` where it can be, else `sdpa`."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What the backward pass computes again instead of keeping it: nothing; all but what matrix products and attention made; all but
    the input of each layer."""
    compile: bool = False
    """Each layer by torch.compile, attention apart; minutes at the start of a large model. Not with `selective`: compiled code already
    computes again what is cheap."""
    sharding: ShardingConfig = ShardingConfig()
    """With `processes` of at least 1."""
    tensor_parallel: int = Field(default=1, ge=1, le=1024)
    """Ranks that share each matrix: 1, more are not offered yet."""
    context_parallel: int = Field(default=1, ge=1, le=1024)
    """Ranks that share each sequence: 1, more are not offered yet."""

    @model_validator(mode="after")
    def _only_the_model_is_cut(self) -> ParallelConfig:
        for name, remedy in (("tensor_parallel", "FSDP2 shards the model over trainer.processes ranks."),
                             ("context_parallel", "A sequence stays on one rank: trainer.activation_checkpointing=full makes room.")):
            if (given := getattr(self, name)) != 1:
                raise ConfigError(f"trainer.{name}", value=given, allowed="1: more are not offered yet", remedy=remedy)
        return self

    @model_validator(mode="after")
    def _compiled_layers_choose_for_themselves(self) -> ParallelConfig:
        if self.compile and self.activation_checkpointing == "selective":
            raise ConfigError("trainer.compile, trainer.activation_checkpointing", value=(True, "selective"),
                              allowed="none or full with compile", remedy="Compiled layers already compute again what is cheap.")
        return self
