"""What is done to each transformer layer before the model is sharded: computing activations again, and compiling.

Only `forward` of the layer is replaced: parameters keep their names, and FSDP2's hooks stay outside.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from asyncrl.errors import ConfigError

_aten = torch.ops.aten
KEPT_OPERATIONS = frozenset({
    _aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.baddbmm.default, _aten._grouped_mm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default, _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default, _aten._scaled_dot_product_cudnn_attention.default})
"""What `selective` keeps: nearly all of a layer's work. What is left is norms, activations and sums, and what is compiled, flex among it,
since the policy is not asked inside."""
_FLASH = "flash_attn."
"""How the names of flash-attn's own operations begin."""


def layers_of(lm: PreTrainedModel) -> list[nn.Module]:
    """The transformer layers in order: modules of the classes that the model says are not to be split. FSDP2 derives a class from each."""
    classes = set(lm._no_split_modules or ())
    return [module for module in lm.modules() if any(base.__name__ in classes for base in type(module).__mro__)]


def checkpoint_activations(layers: Sequence[nn.Module], how: Literal["none", "selective", "full"]) -> None:
    """Let the backward pass compute again what `TrainerConfig.activation_checkpointing` says."""
    if how == "none":
        return
    settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # nothing is drawn: there is no dropout
    if how == "selective":
        settings["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, **settings)  # type: ignore[method-assign]


def compile_layers(layers: Sequence[nn.Module], device: torch.device) -> None:
    """Compile each layer, at its first use, for any number of tokens. Raises ConfigError where there is no compiler."""
    require_compiler(device)
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)  # type: ignore[method-assign]


def require_compiler(device: torch.device) -> None:
    """Raise ConfigError unless torch.compile can make code for the device."""
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            raise ConfigError("trainer.compile", value=True, allowed="where a C++ compiler is installed: on a CPU torch.compile calls it",
                              remedy="Install g++, or leave trainer.compile out.") from error
    elif not torch.utils._triton.has_triton():
        raise ConfigError("trainer.compile", value=True, allowed="where triton is installed and has code for the GPU",
                          remedy="Install triton, or leave trainer.compile out.")


def _policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    is_kept = operation in KEPT_OPERATIONS or str(operation).startswith(_FLASH)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
