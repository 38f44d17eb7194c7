"""Low-rank adapters in a Hugging Face model, made by peft in place: the model keeps its class, its layers hold theirs as `base_layer`.

Trainer and engines make them alike from the same settings. Outside of memory their tensors have the names that a checkpoint would:
frozen weights those of the model's own files, adapters `LAYER.lora_A.weight` and `LAYER.lora_B.weight`. This is the one file that
imports peft, and it does so only when adapters are made: they are optional.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from asyncrl.errors import ConfigError
from asyncrl.lora_config import ALL_LINEAR, LoRA

_NAME = "default"
"""Of the one adapter of a layer, as peft counts them."""
_SHOWN = 6
"""Names in an error message."""


def add_adapters(model: PreTrainedModel, config: LoRA) -> None:
    """Freeze the model and put adapters, in its dtype, beside the layers that `config` chooses, in place; nothing it computes changes yet.

    Raises ConfigError when nothing is chosen, or what cannot have adapters. Draws from a random stream of its own.
    """
    from peft import LoraConfig, inject_adapter_in_model

    layers = chosen_layers(model, config)
    model.requires_grad_(False)
    settings = LoraConfig(r=config.rank, lora_alpha=config.alpha, use_rslora=config.rslora, target_modules=layers, lora_dropout=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        inject_adapter_in_model(settings, model, adapter_name=_NAME)
    model.eval()


def chosen_layers(model: PreTrainedModel, config: LoRA) -> list[str]:
    """Names of the layers that get adapters, in the model's order. Raises ConfigError."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    linear = {name for name, module in model.named_modules() if type(module) is nn.Linear and module is not head}
    chosen: set[str] = set()
    for target in config.targets:
        named = linear if target == ALL_LINEAR else {name for name, _ in model.named_modules()
                                                     if re.fullmatch(rf"(?:.*\.)?(?:{target})", name)}
        ends = [name for name, module in model.named_modules() if name in named and module in (head, embeddings)]
        if ends:
            raise ConfigError("lora.targets", value=target, allowed="linear layers between the embeddings and the head",
                              remedy=f"It matches {ends[0]}: logprobs are computed from the head's own weight, a piece at a time, and "
                                     "embeddings are no linear layer. Name others, or all_linear.")
        if not named & linear:
            kinds = sorted({name.rpartition(".")[2] for name in linear})
            raise ConfigError("lora.targets", value=target, allowed=f"what matches a linear layer of the model, such as {kinds[:_SHOWN]}",
                              remedy="Correct it, or take all_linear." if linear else "Without a linear layer it cannot have adapters.")
        chosen |= named & linear
    return [name for name, _ in model.named_modules() if name in chosen]


def adapted_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Layers that have adapters, by their name in the model; none in a model without."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A") and hasattr(module, "base_layer")}


def checkpoint_name(name: str) -> str:
    """The name outside of memory of a tensor of a model that may have adapters."""
    return name.replace(".base_layer.", ".").replace(f".lora_A.{_NAME}.", ".lora_A.").replace(f".lora_B.{_NAME}.", ".lora_B.")


def is_adapter(name: str) -> bool:
    """Whether a tensor of this name, outside of memory, is of an adapter."""
    return name.endswith((".lora_A.weight", ".lora_B.weight"))


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes what it did before it had adapters, bit for bit. A model without is left as it is.

    The switch of each layer is set by hand: peft's own also turns `requires_grad` of all adapters off and on, which FSDP2 keeps account of.
    """
    layers = list(adapted_layers(model).values())
    before = [layer._disable_adapters for layer in layers]
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer, was in zip(layers, before, strict=True):
            layer._disable_adapters = was


def adapter_shapes(folder: Path, config: LoRA) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor of the adapters that the model of a folder would get, by name. Holds no weights. Raises ConfigError."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        add_adapters(model, config)
    shapes = {checkpoint_name(name): tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return {name: shape for name, shape in shapes.items() if is_adapter(name)}


def save_adapters(tensors: Mapping[str, Tensor], folder: Path, *, config: LoRA, base: str) -> None:
    """Write adapters, by name outside of memory, as `PeftModel.from_pretrained` and vLLM read them; `base` is the model they belong to."""
    from peft import LoraConfig

    layers = sorted({name.rpartition(".lora_")[0] for name in tensors})
    settings = LoraConfig(r=config.rank, lora_alpha=config.alpha, use_rslora=config.rslora, target_modules=layers, lora_dropout=0.0,
                          task_type="CAUSAL_LM", base_model_name_or_path=base, inference_mode=True)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({f"base_model.model.{name}": tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    settings.save_pretrained(folder)
