"""Where a model lies: the folder a user names, or the one a Hugging Face id is fetched to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_OF_A_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
"""Names in config.json; families have one of each, or none."""
_FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]


def model_folder(model: str | Path) -> Path:
    """The local folder of a model path or Hugging Face id; an id is fetched once into the hub's own cache.

    Raises ConfigError when it is neither, or cannot be fetched.
    """
    if (Path(model) / "config.json").is_file():
        return Path(model)
    if Path(model).exists() or str(model).count("/") != 1:
        raise ConfigError("model", value=str(model), allowed="a folder that holds config.json, or a Hugging Face id",
                          remedy="Check the path: a recipe's paths are looked for beside it, then in the working folder; "
                                 "an id looks like Qwen/Qwen3-0.6B.")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(model), allow_patterns=_FILES))
    except (OSError, ValueError) as error:
        raise ConfigError("model", value=str(model), allowed="a folder that holds config.json, or a Hugging Face id that can be fetched",
                          remedy=f"No such folder is here, and fetching it as an id failed: {type(error).__name__}: {error}") from error


def expert_counts(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Experts of a layer, and of a token, by a model's configuration; None without experts."""
    experts, of_token = (next((config[name] for name in names if isinstance(config.get(name), int)), 0)
                         for names in (_EXPERTS, _EXPERTS_OF_A_TOKEN))
    return (experts, of_token) if experts and of_token else None


def route_bytes(config: Mapping[str, Any]) -> int:
    """Most bytes that a record of the experts of one token takes; 0 without experts. Layers without any are counted too."""
    counts = expert_counts(config)
    return 0 if counts is None else 2 * counts[1] * int(config.get("num_hidden_layers") or 0)


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Turns whatever fails while files of a model are read into a ConfigError that names them."""
    try:
        yield
    except (ConfigError, MemoryError):
        raise
    except Exception as error:  # the readers of JSON, tokenizers and safetensors have no error type in common
        raise ConfigError("model", value=str(path), allowed="whole files that fit one another: config.json, safetensors, tokenizer.json",
                          remedy=f"Reading failed: {type(error).__name__}: {error}") from error
