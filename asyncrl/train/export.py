"""A Hugging Face folder of the current weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from transformers import PreTrainedModel

from asyncrl.errors import NonFiniteError
from asyncrl.train.parallel import Ranks, whole
from asyncrl.weights.torch_pieces import checkpoint_tensors

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
"""Files of the source folder that hold weights or list them; all others are copied."""


def export_folder(lm: PreTrainedModel, *, source: Path, target: Path, ranks: Ranks) -> None:
    """Write weights in the source's dtype, tied ones once, and every other file of the source folder beside them.

    Every rank must call it; rank 0 writes, beside `target` first: what has no place leaves nothing there. Raises NonFiniteError rather
    than export a NaN or an infinity.
    """
    dtype = _source_dtype(source)
    tensors = {}
    for name, tensor in checkpoint_tensors(lm).items():
        full = whole(tensor)
        full = full.to(dtype if full.is_floating_point() else full.dtype)
        if not bool(torch.isfinite(full).all()):
            raise NonFiniteError(f"{name} holds a value that is not finite as {full.dtype}; it is not exported")
        if ranks.rank == 0:
            tensors[name] = full.cpu().contiguous()
    if ranks.rank:
        return
    place = target.with_name(f".{target.name}.unfinished")
    shutil.rmtree(place, ignore_errors=True)
    try:
        place.mkdir(parents=True)
        for file in source.iterdir():
            if file.is_file() and not file.name.endswith(WEIGHT_SUFFIXES):
                shutil.copyfile(file, place / file.name)
        save_torch_state_dict(tensors, place)
        target.mkdir(exist_ok=True)
        for file in place.iterdir():
            file.replace(target / file.name)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _source_dtype(source: Path) -> torch.dtype:
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    return getattr(torch, config.get("dtype") or config.get("torch_dtype") or "float32")
