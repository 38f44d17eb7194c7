"""Trainer state in and out of safetensors files: each rank writes what it holds, and reads what it needs from whoever wrote it.

A tensor is keyed `NAME@START`: a run of its elements in flat order, from START. So any number of ranks can load what any
other number saved, bit for bit.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncrl.errors import CheckpointError, NonFiniteError
from asyncrl.train.parallel import flat_span


def save_shards(tensors: Mapping[str, Tensor], path: Path, *, rank: int) -> None:
    """Write this rank's share of every tensor and sync it; what all ranks hold alike is the lowest rank's.

    Raises NonFiniteError, leaving no file, for a NaN or an infinity.
    """
    shares: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        start, flat = flat_span(tensor)
        if flat.is_floating_point() and not bool(torch.isfinite(flat).all()):
            raise NonFiniteError(f"{name} holds a value that is not finite; it is not saved")
        if len(flat) and (rank == 0 or isinstance(tensor, DTensor)):
            shares[f"{name}@{start}"] = flat.cpu()
    save_file(shares, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def load_shards(tensors: Mapping[str, Tensor], paths: list[Path]) -> None:
    """Fill this rank's share of every tensor, in place. Raises CheckpointError unless each element is found once."""
    missing = {name: len(flat_span(tensor)[1]) for name, tensor in tensors.items()}
    for path in paths:
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118
                name, _, start = key.rpartition("@")
                if name not in tensors:
                    raise CheckpointError(f"{path} holds {name}, which this model does not have")
                missing[name] -= _copy_overlap(tensors[name], file.get_slice(key), int(start))
    wrong = [name for name, count in missing.items() if count]
    if wrong:
        raise CheckpointError(f"{paths[0].parent} lacks elements of {wrong[0]} ({len(wrong)} tensors are incomplete)")


@torch.no_grad()
def _copy_overlap(tensor: Tensor, stored: object, stored_start: int) -> int:
    """Copy the elements both sides have; how many."""
    start, flat = flat_span(tensor)
    low = max(start, stored_start)
    high = min(start + len(flat), stored_start + stored.get_shape()[0])  # type: ignore[attr-defined]
    if low >= high:
        return 0
    flat[low - start:high - start] = stored[low - stored_start:high - stored_start].to(flat.device)  # type: ignore[index]
    return high - low
