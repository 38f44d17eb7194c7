"""Whether a model folder is whole: read without torch, in milliseconds, before anything starts."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.model_folder import reading
from asyncrl.tokenizer import Tokenizer

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header."""
_LARGEST_HEADER_BYTES = 100_000_000
"""What the safetensors library itself refuses to read."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What the weights of a folder take."""

    parameters: int
    weights_bytes: int
    """On disk, in the dtypes they are saved in."""
    matrix_sides: int = 0
    """Rows and columns of all matrices together: what adapters of rank 1 beside each would have of parameters."""


def check_model(folder: Path) -> ModelSize:
    """The size of a whole model that can be trained. Raises ConfigError naming the file that is missing, damaged, or does not fit."""
    with reading(folder):
        config = _config(folder)
        _check_architecture(folder, config)
        size = _weights_size(folder)
        largest = Tokenizer(folder).largest_id
    vocab_size = (config.get("text_config") or config).get("vocab_size")
    if isinstance(vocab_size, int) and largest >= vocab_size:
        raise ConfigError("model", value=f"vocab_size {vocab_size} in {folder / 'config.json'}",
                          allowed=f"more than {largest}, the largest id of its tokenizer",
                          remedy="The tokenizer is another model's: take the one that was saved with these weights.")
    return size


def causal_lm_types() -> frozenset[str]:
    """Values of `model_type` that the installed transformers makes a causal LM of, read from its source; empty when they are not found."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return frozenset()
    source = Path(spec.origin).parent / "models" / "auto" / "modeling_auto.py"
    text = source.read_text(encoding="utf-8") if source.is_file() else ""
    table = re.search(r"MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = OrderedDict\((.*?)\n\)\n", text, re.DOTALL)
    return frozenset(re.findall(r'\(\s*"([^"]+)",', table[1])) if table else frozenset()


def _config(folder: Path) -> Mapping[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError("model", value=str(folder), allowed="a folder that holds config.json", remedy=_found(folder))
    with reading(path):
        return dict(json.loads(path.read_text(encoding="utf-8")))


def _check_architecture(folder: Path, config: Mapping[str, Any]) -> None:
    kind, known = config.get("model_type"), causal_lm_types()
    wrong = (f"model_type {kind!r}" if known and kind not in known else
             "an encoder and a decoder" if config.get("is_encoder_decoder") else "")
    if wrong:
        raise ConfigError("model", value=f"{wrong} in {folder / 'config.json'}",
                          allowed="a causal language model that the installed transformers has",
                          remedy=f"Its architectures are {config.get('architectures')}; choose a decoder such as Qwen3ForCausalLM.")


def _weights_size(folder: Path) -> ModelSize:
    """Raises ConfigError unless every weight file that is named is there and whole."""
    sizes = [_file_size(path) for path in _weight_files(folder)]
    return ModelSize(sum(size.parameters for size in sizes), sum(size.weights_bytes for size in sizes),
                     sum(size.matrix_sides for size in sizes))


def _weight_files(folder: Path) -> list[Path]:
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    if not (folder / _INDEX).is_file():
        raise ConfigError("model", value=str(folder), allowed=f"a folder with weights: {_WEIGHTS}, or shards and {_INDEX}",
                          remedy=_found(folder))
    with reading(folder / _INDEX):
        names = sorted(set(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing or not names:
        raise ConfigError("model", value=str(folder / _INDEX), allowed=f"an index whose {len(names)} shards are there",
                          remedy=f"Missing: {missing[:3]} ({len(missing)} in all). Fetch the model again.")
    return [folder / name for name in names]


def _file_size(path: Path) -> ModelSize:
    total = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if total < _LENGTH_BYTES or length > min(_LARGEST_HEADER_BYTES, total - _LENGTH_BYTES):
                raise _damaged(path, f"its {total} bytes have no room for a header of {length}" if total >= _LENGTH_BYTES else
                               f"it has {total} bytes")
            tensors = [entry for name, entry in json.loads(file.read(length)).items() if name != "__metadata__"]
        end = max((entry["data_offsets"][1] for entry in tensors), default=0)
        parameters = sum(math.prod(entry["shape"]) for entry in tensors)
        sides = sum(sum(entry["shape"]) for entry in tensors if len(entry["shape"]) == 2)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        if isinstance(error, ConfigError):
            raise
        raise _damaged(path, f"its header cannot be read: {type(error).__name__}: {error}") from error
    if total != _LENGTH_BYTES + length + end:
        raise _damaged(path, f"its header describes {_LENGTH_BYTES + length + end} bytes, the file has {total}")
    return ModelSize(parameters, end, sides)


def _damaged(path: Path, how: str) -> ConfigError:
    return ConfigError("model", value=str(path), allowed="a whole safetensors file",
                       remedy=f"It is cut off or damaged: {how}. Fetch or save it again.")


def _found(folder: Path) -> str:
    """What is there instead."""
    if not folder.is_dir():
        return "There is no such folder; a recipe's paths are looked for beside it, then in the working folder."
    names = sorted(path.name for path in folder.iterdir())
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
    if pickles:
        return f"{pickles[0]} is a pickle, which is not read: save the model again with save_pretrained."
    return f"It holds {names[:8]}." if names else "It is empty."
