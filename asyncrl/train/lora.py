"""What of a policy with adapters differs from one without: what is saved, what an export holds, the policy without them."""

from __future__ import annotations

import shutil
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import xxhash
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncrl import adapters
from asyncrl.errors import CheckpointError, NonFiniteError
from asyncrl.lora_config import LoRA
from asyncrl.train.model import Policy
from asyncrl.train.parallel import Ranks, whole
from asyncrl.weights.torch_pieces import checkpoint_tensors

_READ_BYTES = 1 << 24


def adapters_off(policy: Policy) -> AbstractContextManager[None]:
    """Inside, `policy` is the model it was made from, bit for bit: a reference without a copy. For forwards without a gradient."""
    return adapters.adapters_off(policy.lm)


class Merged:
    """The tensors of a checkpoint without adapters: W + scale · B · A where there are some."""

    def __init__(self, lm: PreTrainedModel) -> None:
        self.tensors = {name: tensor for name, tensor in checkpoint_tensors(lm).items() if not adapters.is_adapter(name)}
        """By name; where there are adapters, what lies beneath them, of the same shape."""
        self._beside = {f"{name}.weight": layer for name, layer in adapters.adapted_layers(lm).items()}

    @torch.no_grad()
    def whole(self, name: str) -> Tensor:
        """One of them, gathered and merged, in float32; every rank must call it."""
        full, layer = whole(self.tensors[name]), self._beside.get(name)
        if layer is None:
            return full
        (a,), (b,), (scale,) = layer.lora_A.values(), layer.lora_B.values(), layer.scaling.values()
        return full + scale * (whole(b.weight) @ whole(a.weight))


def trained_tensors(lm: nn.Module) -> dict[str, Tensor]:
    """Tensors of adapters by checkpoint name; of a model without adapters every one."""
    tensors = checkpoint_tensors(lm)
    return {name: tensor for name, tensor in tensors.items() if adapters.is_adapter(name)} if adapters.adapted_layers(lm) else tensors


@torch.no_grad()
def export_adapters(lm: PreTrainedModel, folder: Path, *, config: LoRA, base: str, ranks: Ranks) -> None:
    """Write what `PeftModel.from_pretrained` reads onto the model `base`. Every rank must call it; rank 0 writes, whole files alone.

    Raises NonFiniteError.
    """
    tensors = {}
    for name, tensor in trained_tensors(lm).items():
        full = whole(tensor).cpu()
        if not bool(torch.isfinite(full).all()):
            raise NonFiniteError(f"{name} holds a value that is not finite; it is not exported")
        tensors[name] = full
    if ranks.rank == 0:
        place = folder.with_name(f".{folder.name}.unfinished")
        shutil.rmtree(place, ignore_errors=True)
        try:
            adapters.save_adapters(tensors, place, config=config, base=base)
            folder.mkdir(exist_ok=True)
            for file in place.iterdir():
                file.replace(folder / file.name)
        finally:
            shutil.rmtree(place, ignore_errors=True)


def base_digest(folder: Path) -> str:
    """xxh3-128 of the weight files of a model folder, in the order of their names: safetensors, or pickles where it has none of these, as
    transformers chooses. Raises CheckpointError for a folder without either."""
    paths = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    if not paths:
        raise CheckpointError(f"{folder} holds no weight files (*.safetensors, *.bin): nothing says which model adapters belong to.")
    digest = xxhash.xxh3_128()
    for path in paths:
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while data := file.read(_READ_BYTES):
                digest.update(data)
    return digest.hexdigest()


def require_base(saved: str, *, found: str, folder: Path) -> None:
    """Raise CheckpointError unless the model folder, of digest `found`, is the one that a checkpoint's adapters were trained on."""
    if not saved:
        raise CheckpointError("the checkpoint holds a whole model, not adapters: it was saved without lora, and is resumed so.")
    if saved != found:
        raise CheckpointError(f"the checkpoint's adapters were trained on other weights than those in {folder}: their xxh3-128 was "
                              f"{saved}, it is {found}. Resume with the model that the run began with.")
