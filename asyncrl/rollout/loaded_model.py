"""A model in memory for sampling."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from asyncrl.causal_lm import load_causal_lm


def load_model(folder: Path, *, dtype: str) -> PreTrainedModel:
    """The model of a folder on the CPU, in evaluation mode, every parameter cast to `dtype`, without gradients."""
    return load_causal_lm(folder, dtype=getattr(torch, dtype), attention="sdpa").requires_grad_(False)
