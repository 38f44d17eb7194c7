"""A model in memory for sampling."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from asyncrl.adapters import add_adapters
from asyncrl.causal_lm import load_causal_lm
from asyncrl.errors import ConfigError
from asyncrl.expert_routing import Routing
from asyncrl.lora_config import LoRA


def load_model(folder: Path, *, dtype: str, lora: LoRA | None = None) -> PreTrainedModel:
    """The model of a folder on the CPU, in evaluation mode, every parameter cast to `dtype`, without gradients; with room for adapters."""
    model = load_causal_lm(folder, dtype=getattr(torch, dtype), attention="sdpa")
    if lora:
        add_adapters(model, lora)
    return model.requires_grad_(False)


def model_routing(model: PreTrainedModel) -> Routing | None:
    """Its routers, to record what they choose; None of a mixture of experts whose choice cannot be seen: nothing is recorded of it."""
    try:
        return Routing(model, forward=lambda: model(input_ids=torch.tensor([[0, 1]], device=model.device), use_cache=False))
    except ConfigError:
        return None
