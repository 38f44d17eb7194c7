"""A Hugging Face folder of the current weights, gathered a tensor at a time and written a shard at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from asyncrl.errors import CheckpointError, ConfigError, NonFiniteError
from asyncrl.paths import sync
from asyncrl.train.export_form import ExportForm
from asyncrl.train.lora import Merged
from asyncrl.train.parallel import Ranks

INDEX = "model.safetensors.index.json"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
"""Files of the source folder that hold weights or list them; all others are copied."""
_CONFIG = "config.json"
_DTYPE_KEYS = ("dtype", "torch_dtype")
"""What transformers calls it, and called it."""


def export_folder(lm: PreTrainedModel, *, source: Path, target: Path, ranks: Ranks, form: ExportForm) -> None:
    """Write the weights, tied ones once, adapters merged, and every other file of the source folder: tokenizer, chat template, generation.

    Under the names of the source: transformers may hold several tensors of a file, such as those of all experts, as one.

    Every rank must call it; rank 0 writes, and holds one shard and one tensor at most. The folder appears at `target` whole, in
    one rename, in place of an older model folder there; other files of that one stay. Raises NonFiniteError rather than export a NaN
    or an infinity, ConfigError where something that is no model folder lies at `target`, CheckpointError or OSError where there is no room.
    """
    _require_replaceable(target)
    dtype = _source_dtype(source) if form.dtype == "source" else getattr(torch, form.dtype)
    merged = Merged(lm)
    tensors = merged.tensors
    shards = _shards(tensors, dtype=dtype, most_bytes=form.max_shard_bytes)
    place = _beside(target, "unfinished")
    if ranks.rank == 0:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
    try:
        written = {}
        for file, names in shards.items():
            shard = {name: _exported(name, merged.whole(name), dtype=dtype, keep=ranks.rank == 0) for name in names}
            if ranks.rank == 0:
                as_filed = {filed: part for name, tensor in shard.items() for filed, part in _as_filed(lm, name, tensor).items()}
                _save(as_filed, place / file)
                written[file] = list(as_filed)
        if ranks.rank == 0:
            _write_index(place, written, bytes_in_all=sum(_exported_bytes(tensor, dtype) for tensor in tensors.values()))
            _copy_others(source, place, dtype=dtype)
            _take_the_place(place, target)
    finally:
        if ranks.rank == 0:
            shutil.rmtree(place, ignore_errors=True)


def _shards(tensors: Mapping[str, Tensor], *, dtype: torch.dtype, most_bytes: int) -> dict[str, list[str]]:
    """Names of the tensors of each file, in their order; a new file begins where the last would grow over `most_bytes`."""
    contents: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        nbytes = _exported_bytes(tensor, dtype)
        if contents[-1] and size + nbytes > most_bytes:
            contents.append([])
            size = 0
        contents[-1].append(name)
        size += nbytes
    if len(contents) == 1:
        return {"model.safetensors": contents[0]}
    return {f"model-{number:05d}-of-{len(contents):05d}.safetensors": names for number, names in enumerate(contents, start=1)}


def _exported_bytes(tensor: Tensor, dtype: torch.dtype) -> int:
    return tensor.numel() * (dtype if tensor.is_floating_point() else tensor.dtype).itemsize


def _exported(name: str, full: Tensor, *, dtype: torch.dtype, keep: bool) -> Tensor:
    """All of a tensor, on the CPU; where it is not to be kept only the check that every rank makes alike."""
    full = full.to(dtype if full.is_floating_point() else full.dtype)
    if not bool(torch.isfinite(full).all()):
        raise NonFiniteError(f"{name} holds a value that is not finite as {full.dtype}; it is not exported")
    return full.cpu().contiguous() if keep else full.new_empty(0)


def _as_filed(lm: PreTrainedModel, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The tensors that transformers made this one of when it loaded the model, by their names in the files; most often itself."""
    parts = revert_weight_conversion(lm, {name: tensor})
    return {filed: part if part is tensor else part.clone(memory_format=torch.contiguous_format) for filed, part in parts.items()}


def _save(shard: dict[str, Tensor], file: Path) -> None:
    try:
        save_file(shard, file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise CheckpointError(f"export {file.name} in {file.parent} cannot be written: {error}") from error


def _write_index(place: Path, shards: Mapping[str, Sequence[str]], *, bytes_in_all: int) -> None:
    if len(shards) > 1:
        index = {"metadata": {"total_size": bytes_in_all}, "weight_map": {name: file for file, names in shards.items() for name in names}}
        (place / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _copy_others(source: Path, place: Path, *, dtype: torch.dtype) -> None:
    """Files that hold no weights, as they are; config.json says what dtype the weights have now."""
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(WEIGHT_SUFFIXES):
            shutil.copyfile(file, place / file.name)
    config = json.loads((source / _CONFIG).read_text(encoding="utf-8"))
    if _source_dtype(source) != dtype:
        true = _with_dtype(config, str(dtype).removeprefix("torch."))
        named = any(key in config for key in _DTYPE_KEYS)
        (place / _CONFIG).write_text(json.dumps(true if named else {"dtype": str(dtype).removeprefix("torch.")} | true, indent=2) + "\n",
                                     encoding="utf-8")


def _with_dtype(config: Any, dtype: str) -> Any:
    """The configuration with every dtype in it, those of parts of the model too, replaced."""
    if not isinstance(config, dict):
        return config
    return {key: dtype if key in _DTYPE_KEYS and isinstance(value, str) else _with_dtype(value, dtype) for key, value in config.items()}


def _source_dtype(source: Path) -> torch.dtype:
    config = json.loads((source / _CONFIG).read_text(encoding="utf-8"))
    return getattr(torch, config.get("dtype") or config.get("torch_dtype") or "float32")


def _require_replaceable(target: Path) -> None:
    if target.exists() and not (target.is_dir() and (not any(target.iterdir()) or (target / _CONFIG).is_file())):
        raise ConfigError("path", value=str(target), allowed="a new folder, an empty one, or a model folder, which is replaced",
                          remedy="Something else lies there: export beside it.")


def _take_the_place(place: Path, target: Path) -> None:
    for file in place.iterdir():
        sync(file)
    replaced, whole_target = _beside(target, "replaced"), target.resolve()
    shutil.rmtree(replaced, ignore_errors=True)
    if whole_target.exists():
        whole_target.rename(replaced)
    place.rename(whole_target)
    sync(whole_target.parent)
    if replaced.exists():
        for left in replaced.iterdir():
            if not left.name.endswith(WEIGHT_SUFFIXES) and not (whole_target / left.name).exists():
                left.rename(whole_target / left.name)
        shutil.rmtree(replaced)


def _beside(target: Path, state: str) -> Path:
    whole_target = target.resolve()
    return whole_target.with_name(f".{whole_target.name}.{state}")
