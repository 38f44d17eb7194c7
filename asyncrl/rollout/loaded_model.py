"""A model in memory for sampling."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel


def load_model(folder: Path, *, dtype: str) -> PreTrainedModel:
    """The model of a folder on the CPU, in evaluation mode, every parameter cast to `dtype`, without gradients."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    return model.eval().requires_grad_(False)
