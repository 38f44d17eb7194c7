"""The memory of a model's weights, given back while an engine sleeps and taken anew when it wakes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.weights.targets import MemoryTarget
from asyncrl.weights.torch_pieces import checkpoint_tensors, memory_targets


class ReleasableWeights:
    """What is published of a model: parameters and persistent buffers. The objects stay, so that what is tied stays tied."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._released: list[tuple[Tensor, torch.Size]] = []

    def targets(self) -> Mapping[str, MemoryTarget]:
        """The memory a `Receiver` writes to; gone with `release`, another one after `restore`."""
        return memory_targets(checkpoint_tensors(self._model))

    def release(self) -> int:
        """Free the memory, in bytes. It is free once nobody holds `targets` any more."""
        held = {id(tensor): tensor for tensor in self._model.state_dict(keep_vars=True).values()}
        self._released = [(tensor, tensor.shape) for tensor in held.values()]
        freed_bytes = sum(tensor.nbytes for tensor in held.values())
        for tensor in held.values():
            tensor.data = tensor.data.new_empty(0)
        return freed_bytes

    def restore(self) -> None:
        """Memory of the same shapes again, of any content."""
        for tensor, shape in self._released:
            tensor.data = tensor.data.new_empty(shape)
        self._released = []
