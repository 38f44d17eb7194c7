"""Which attention backend a model gets, by what the machine has."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from asyncrl.errors import ConfigError
from asyncrl.train.attention import PACKED, attend_by_sequence, packed

Backend = Literal["sdpa", "flex", "flash"]

_NAMES: dict[Backend, str] = {"sdpa": PACKED, "flex": "asyncrl_packed_flex", "flash": "asyncrl_packed_flash"}
_FLASH_HEAD_DIM, _FLEX_HEAD_DIM = 256, 16
"""The widest head flash-attn has kernels for, the narrowest flex_attention has."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A backend, and why it is that one."""

    backend: Backend
    reason: str


def register(backend: Backend = "sdpa") -> str:
    """Make a backend known to transformers; its name there. Safe to call again. Imports what the backend needs."""
    if backend == "flash":
        from asyncrl.train.flash import attend_flash as attend
    elif backend == "flex":
        from asyncrl.train.flex import attend_flex as attend
    else:
        attend = attend_by_sequence
    if _NAMES[backend] not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        ALL_ATTENTION_FUNCTIONS.register(_NAMES[backend], packed(attend))
    return _NAMES[backend]


def choose(wanted: Backend | Literal["auto"], *, lm: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> Choice:
    """The backend to use. Raises ConfigError for one that cannot be had here."""
    lacking = {"flash": _lacks_flash(lm, device, dtype), "flex": _lacks_flex(lm, device), "sdpa": ""}
    if wanted != "auto":
        if lacking[wanted]:
            raise ConfigError("trainer.attention", value=wanted, allowed=f"{' or '.join(b for b, why in lacking.items() if not why)} here: "
                                                                         f"{lacking[wanted]}",
                              remedy="Set trainer.attention to auto, which takes the fastest there is.")
        return Choice(wanted, "as asked for")
    backend: Backend = next(name for name, why in lacking.items() if not why)  # type: ignore[assignment]
    return Choice(backend, "; ".join(f"no {name}: {why}" for name, why in lacking.items() if why) or "the fastest there is")


def use(choice: Choice, lm: PreTrainedModel) -> None:
    """Give the model's layers this backend."""
    lm.set_attn_implementation(register(choice.backend))


def _lacks_flash(lm: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> str:
    """Why flash-attn cannot be used; empty when it can."""
    if device.type != "cuda":
        return "flash needs a GPU"
    if importlib.util.find_spec("flash_attn") is None:
        return "flash-attn is not installed (the extra `flash-attn`)"
    if dtype != torch.bfloat16:
        return f"flash computes in bfloat16, trainer.dtype is {str(dtype).removeprefix('torch.')}"
    if getattr(lm.config.get_text_config(), "v_head_dim", None) is not None:
        return "flash has keys and values of one width"
    head_dim = _head_dim(lm)
    return "" if head_dim <= _FLASH_HEAD_DIM else f"flash has heads of at most {_FLASH_HEAD_DIM}, this model's have {head_dim}"


def _lacks_flex(lm: PreTrainedModel, device: torch.device) -> str:
    """Why flex_attention cannot be used; empty when it can."""
    if device.type != "cuda":
        return "flex needs a GPU"
    if importlib.util.find_spec("triton") is None:
        return "flex is compiled by triton, which is not installed"
    head_dim = _head_dim(lm)
    return "" if head_dim >= _FLEX_HEAD_DIM else f"flex has heads of at least {_FLEX_HEAD_DIM}, this model's have {head_dim}"


def _head_dim(lm: PreTrainedModel) -> int:
    config = lm.config.get_text_config()
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
