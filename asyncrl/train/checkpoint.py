"""Trainer state in and out of safetensors files: each rank writes what it holds, and reads what it needs from whoever wrote it.

A tensor is keyed `NAME@START`: a run of its elements in flat order, from START; the metadata have the shapes of the whole ones.
So any number of ranks can load what any other number saved, bit for bit.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncrl.errors import CheckpointError, NonFiniteError
from asyncrl.train.parallel import flat_span

_SHAPES = "shapes"


def save_shards(tensors: Mapping[str, Tensor], path: Path, *, rank: int) -> None:
    """Write this rank's share of every tensor and sync it; what all ranks hold alike is the lowest rank's.

    Raises NonFiniteError for a NaN or an infinity, CheckpointError for a file that cannot be written, leaving none.
    """
    shares: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        start, flat = flat_span(tensor)
        if flat.is_floating_point() and not bool(torch.isfinite(flat).all()):
            raise NonFiniteError(f"{name} holds a value that is not finite; it is not saved")
        if len(flat) and (rank == 0 or isinstance(tensor, DTensor)):
            shares[f"{name}@{start}"] = flat.cpu()
    shapes = json.dumps({name: list(tensor.shape) for name, tensor in tensors.items()})
    try:
        save_file(shares, path, metadata={_SHAPES: shapes})
        with path.open("rb") as file:
            os.fsync(file.fileno())
    except (OSError, SafetensorError) as error:
        path.unlink(missing_ok=True)
        raise CheckpointError(f"{path} cannot be written: {error}") from error


def load_shards(tensors: Mapping[str, Tensor], paths: list[Path]) -> None:
    """Fill this rank's share of every tensor, in place.

    Raises CheckpointError, on every rank alike and before anything is written, unless the files hold each element of each tensor
    once and nothing else.
    """
    _check_whole(tensors, paths)
    for path in paths:
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118
                name, start = _parse(key)
                _copy_overlap(tensors[name], file.get_slice(key), start)


def _check_whole(tensors: Mapping[str, Tensor], paths: list[Path]) -> None:
    spans: dict[str, list[tuple[int, int]]] = {name: [] for name in tensors}
    for path in paths:
        with safe_open(path, "pt") as file:
            shapes = json.loads(file.metadata()[_SHAPES])
            for key in file.keys():  # noqa: SIM118
                name, start = _parse(key)
                if name not in tensors:
                    raise CheckpointError(f"{path} holds {name}, which this model does not have")
                if shapes[name] != list(tensors[name].shape):
                    raise CheckpointError(f"{path} holds {name} of shape {shapes[name]}, this model has {list(tensors[name].shape)}")
                spans[name].append((start, start + file.get_slice(key).get_shape()[0]))
    wrong = [name for name, tensor in tensors.items() if not _tile(sorted(spans[name]), tensor.numel())]
    if wrong:
        raise CheckpointError(f"{paths[0].parent} lacks elements of {wrong[0]} ({len(wrong)} tensors are incomplete)")


def _tile(spans: list[tuple[int, int]], count: int) -> bool:
    """Whether spans in order cover [0, count) without a gap or an overlap."""
    edges = [0, *(edge for span in spans for edge in span), count]
    return edges[::2] == edges[1::2]


def _parse(key: str) -> tuple[str, int]:
    name, _, start = key.rpartition("@")
    return name, int(start)


@torch.no_grad()
def _copy_overlap(tensor: Tensor, stored: Any, stored_start: int) -> None:
    """Copy the elements both sides have."""
    start, flat = flat_span(tensor)
    low = max(start, stored_start)
    high = min(start + len(flat), stored_start + stored.get_shape()[0])
    if low < high:
        flat[low - start:high - start] = stored[low - stored_start:high - stored_start].to(flat.device)
