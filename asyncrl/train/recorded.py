"""Recorded batches: a `CorrectionBatch` as an .npz file, an array for each field by its name.

Written by a run (`trainer.record_batches_every_steps`) or by anyone with `np.savez`; read to try corrections on, without a model. The
file may come from anywhere: nothing in it is executed, shapes and dtypes are read and judged before any array is.
"""

from __future__ import annotations

import dataclasses
import lzma
import os
import tokenize
import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch
from numpy.lib import format as npy

from asyncrl.correction.batch import CorrectionBatch
from asyncrl.errors import ConfigError, NonFiniteError, ShapeError, StalenessError
from asyncrl.paths import recorded_batches

FIELDS = tuple(field.name for field in dataclasses.fields(CorrectionBatch))
MOST_TOKENS = 100_000_000
"""A batch of 800 MB a field; what claims more is no batch of one step."""
MOST_RECORDED = 8
"""So many batches a run keeps, the newest."""
_PER_TOKEN = ("rollout_logprobs", "proximal_logprobs", "advantages", "loss_mask", "turn_ids", "policy_versions")
_KINDS = {"rollout_logprobs": "f", "proximal_logprobs": "f", "advantages": "f", "loss_mask": "b"}
_KIND_NAMES = {"f": "a floating dtype", "b": "bool", "iu": "an integer dtype"}
_BROKEN = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, OSError, ValueError, EOFError, NotImplementedError, RuntimeError,
           SyntaxError, tokenize.TokenError, LookupError, TypeError, ArithmeticError, MemoryError)
"""What reading raises of a file that is not what it seems: cut off, garbage, encrypted, in an unknown compression, a header of
nonsense."""


def save_recorded(batch: CorrectionBatch, path: Path) -> None:
    """Write the file `load_recorded` reads, whole or not at all; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {name: np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value)
              for name in FIELDS if (value := getattr(batch, name)) is not None}
    unfinished = path.with_suffix(".part")
    with unfinished.open("wb") as file:
        np.savez_compressed(file, **arrays)
    os.replace(unfinished, path)


def keep_newest(run: Path, *, count: int) -> None:
    """Remove all recorded batches of a run but the newest `count`."""
    for old in recorded_batches(run)[:-count]:
        old.unlink(missing_ok=True)


def load_recorded(path: Path) -> CorrectionBatch:
    """The batch in a file, checked. Raises ConfigError, which names the array at fault."""
    try:
        with zipfile.ZipFile(path) as file:
            members = {name.removesuffix(".npy") for name in file.namelist()}
            _require_names(path, members)
            shapes = {name: _header(file, name) for name in FIELDS}
            _require_shapes(path, shapes)
            arrays = {name: _read(file, name) for name in FIELDS}
    except ConfigError:
        raise
    except FileNotFoundError:
        raise _refused(path, "there is no such file") from None
    except _BROKEN as error:
        raise _refused(path, f"it cannot be read as .npz: {type(error).__name__}: {error}") from error
    tensors = {name: torch.from_numpy(arrays[name]) for name in FIELDS if name != "version"}
    try:
        batch = CorrectionBatch(**tensors, version=int(arrays["version"]))
        batch.check()
    except (ShapeError, NonFiniteError, StalenessError) as error:
        raise _refused(path, str(error)) from error
    return batch


def _refused(path: Path, why: str) -> ConfigError:
    return ConfigError("NPZ", value=str(path), allowed=f"an .npz file with the arrays {', '.join(FIELDS)}, as CorrectionBatch has them",
                       remedy=f"{why[:300]}.")


def _require_names(path: Path, members: set[str]) -> None:
    if missing := [name for name in FIELDS if name not in members]:
        raise _refused(path, f"it lacks {', '.join(missing)}")


def _header(file: zipfile.ZipFile, name: str) -> tuple[tuple[int, ...], np.dtype]:
    with file.open(f"{name}.npy") as member:
        version = npy.read_magic(member)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = read(member)
    return shape, dtype


def _require_shapes(path: Path, headers: dict[str, tuple[tuple[int, ...], np.dtype]]) -> None:
    (tokens, sequences) = (headers[name][0][0] if headers[name][0] else -1 for name in ("loss_mask", "group_ids"))
    wanted = dict.fromkeys(_PER_TOKEN, (tokens,)) | {"group_ids": (sequences,), "cu_seqlens": (sequences + 1,), "version": ()}
    for name, (shape, dtype) in headers.items():
        kinds = _KINDS.get(name, "iu")
        if shape != wanted[name] or min(tokens, sequences) < 0:
            raise _refused(path, f"{name} has shape {shape}, needs {wanted[name]}: [T] like loss_mask, [N] like group_ids, or one number")
        if dtype.kind not in kinds:
            raise _refused(path, f"{name} is {dtype}, needs {_KIND_NAMES[kinds]}")
    if max(tokens, sequences) > MOST_TOKENS:
        raise _refused(path, f"it claims {max(tokens, sequences):,} tokens; at most {MOST_TOKENS:,} are read")


def _read(file: zipfile.ZipFile, name: str) -> np.ndarray:
    """In the dtype that is computed with."""
    with file.open(f"{name}.npy") as member:
        array = npy.read_array(member, allow_pickle=False)
    kind = _KINDS.get(name, "iu")
    if kind == "f":
        return array.astype(np.float64 if array.dtype.itemsize >= 8 else np.float32)
    return array.astype(np.bool_ if kind == "b" else np.int64)
