"""A loaded model made ready to train, or to score beside the one that does: attention, layers, shards."""

from __future__ import annotations

from typing import Literal

import torch

from asyncrl.train import attention_choice
from asyncrl.train.attention_choice import Choice
from asyncrl.train.config import TrainerConfig
from asyncrl.train.layers import checkpoint_activations, compile_layers, layers_of
from asyncrl.train.model import Body
from asyncrl.train.parallel import Ranks, shard


def make_ready(model: Body, ranks: Ranks, settings: TrainerConfig) -> Choice:
    """Attention, what is computed again, what is compiled, and shards last, whose hooks lie outside of all that; every rank calls it.

    Raises ConfigError for what this machine has not.
    """
    dtype = getattr(torch, compute_dtype(settings, ranks.device))
    choice = attention_choice.choose(settings.attention, lm=model.lm, device=ranks.device, dtype=dtype)
    attention_choice.use(choice, model.lm)
    layers = layers_of(model.lm)
    if settings.compile:
        compile_layers(layers, ranks.device)
    checkpoint_activations(layers, settings.activation_checkpointing)
    shard(model, ranks, compute_dtype=dtype, settings=settings.sharding)
    return choice


def compute_dtype(settings: TrainerConfig, device: torch.device) -> Literal["float32", "bfloat16"]:
    """Of the forward; mixed precision is FSDP2's, so a trainer in the calling process has none."""
    if settings.dtype != "auto":
        return settings.dtype
    return "bfloat16" if device.type == "cuda" and settings.processes else "float32"
