"""What an export is to look like. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from asyncrl.errors import ConfigError

ExportDtype = Literal["source", "float32", "bfloat16", "float16"]
ADAPTER_FOLDER = "adapter"
"""In an exported folder. Not beside its config.json: transformers would take the folder for adapters, whose base is elsewhere."""
SHARD_BYTES = 5_000_000_000
"""Of transformers' own `save_pretrained`, to the order: what a hub takes, and a reader maps at once."""


@dataclass(frozen=True, slots=True)
class ExportForm:
    """Dtype of the weights, and how they spread over files. Raises ConfigError for what there is not."""

    dtype: ExportDtype = "source"
    """`source`: that of the folder the model came from."""
    max_shard_bytes: int = SHARD_BYTES
    """A tensor that is larger has a file of its own."""

    def __post_init__(self) -> None:
        if self.dtype not in (dtypes := get_args(ExportDtype)):
            raise ConfigError("dtype", value=self.dtype, allowed=f"one of {', '.join(dtypes)}", remedy="Choose one; source rounds nothing "
                              "that the source had not rounded.")
        if not isinstance(self.max_shard_bytes, int) or self.max_shard_bytes < 1:
            raise ConfigError("max_shard_bytes", value=self.max_shard_bytes, allowed="a number of bytes, at least 1",
                              remedy=f"Leave it out for {SHARD_BYTES:,}.")
