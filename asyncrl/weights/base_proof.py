"""The checkpoint a runtime model was loaded from: what it holds, and the proof that the model holds the same. Reads only."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from asyncrl.errors import WeightSyncError
from asyncrl.weights.codec import EVERYWHERE
from asyncrl.weights.manifest import TensorEntry
from asyncrl.weights.routed_target import RoutedTarget
from asyncrl.weights.torch_pieces import DTYPE_NAMES

_INDEX = "model.safetensors.index.json"
_CHUNK = 1 << 22
"""Elements compared at a time."""
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def saved_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the folder's safetensors files by name, in their order, without data (device meta): headers alone are read.

    Raises WeightSyncError when there is none, one is in two files, or a file cannot be read.
    """
    found: dict[str, Tensor] = {}
    for path in _files(folder):
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118  no mapping
                header = file.get_slice(name)
                if name in found:
                    raise WeightSyncError(f"{name} is in {path.name} and in another file of {folder}")
                if header.get_dtype() not in _DTYPES:
                    raise WeightSyncError(f"{name} in {path.name} is of dtype {header.get_dtype()}, which cannot be synced")
                found[name] = torch.empty(header.get_shape(), dtype=_DTYPES[header.get_dtype()], device="meta")
    return found


def saved_values(folder: Path, names: Collection[str]) -> Iterator[tuple[str, Tensor, Path]]:
    """The folder's values of `names`, one at a time, each with its file."""
    for path in _files(folder):
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118  no mapping
                if name in names:
                    yield name, file.get_tensor(name), path


def prove_base(targets: Mapping[str, RoutedTarget], *, folder: Path) -> int:
    """Compare every element behind `targets` with the folder's value, cast to the runtime dtype; returns how many were compared.

    Raises WeightSyncError naming the first tensor that differs in one bit: its route is wrong, or the model holds something else.
    """
    return sum(_compare(targets[name], saved, path) for name, saved, path in saved_values(folder, targets.keys()))


def _compare(target: RoutedTarget, saved: Tensor, path: Path) -> int:
    flat, compared = saved.reshape(-1), 0
    for start in range(0, len(flat), _CHUNK):
        length = min(_CHUNK, len(flat) - start)
        chunk = TensorEntry(name=target.name, dtype=target.dtype, shape=target.shape, mode="dense", part=0, offset=0, bytes=0,
                            start=start, length=length, count=length)
        for run, chosen in target.here(chunk, EVERYWHERE):
            expected = flat[run.start:run.start + run.length]
            places = torch.arange(run.length) if chosen.indices is None else torch.from_numpy(chosen.indices)
            expected = expected[places].to(_DTYPES[target.dtype])
            words = target.words(run, chosen).cpu()
            differs = words != expected.view(words.dtype)
            if differs.any():
                first = run.start + int(places[differs.nonzero()[0, 0]])
                raise WeightSyncError(f"{target.name}: {int(differs.sum())} values in the runtime model are not those of {path.name}, "
                                      f"the first at flat index {first}")
            compared += len(words)
    return compared


def _files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())) if index.is_file() else None
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise WeightSyncError(f"{index} cannot be read: {error}") from error
    files = [folder / name for name in names] if names is not None else sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightSyncError(f"{folder} holds no safetensors file")
    return files


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise WeightSyncError(f"{path} cannot be read: {error}") from error
