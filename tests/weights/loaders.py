"""A small model whose loader fuses, pads, splits and ties, and what is recorded of it."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn

from asyncrl.weights.manifest import TensorEntry
from asyncrl.weights.routes import record_routes

HIDDEN, VOCAB, PADDED = 4, 5, 8
CHECKPOINT = {"embed": (VOCAB, HIDDEN), "q": (4, HIDDEN), "k": (2, HIDDEN), "v": (2, HIDDEN), "out": (HIDDEN, 6), "norm": (HIDDEN,),
              "scale": ()}


class Fused(nn.Module):
    """A padded embedding, one projection for three, a row-parallel shard, a plain vector, and a head tied to the embedding."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.full((PADDED, HIDDEN), 0.5, dtype=dtype))
        self.head = self.embed
        self.qkv = nn.Parameter(torch.full((8, HIDDEN), 0.5, dtype=dtype))
        self.out = nn.ParameterList([torch.full((HIDDEN, 3), 0.5, dtype=dtype) for _ in range(2)])
        self.norm = nn.Parameter(torch.full((HIDDEN,), 0.5, dtype=dtype))
        self.spare = nn.Parameter(torch.zeros(HIDDEN, dtype=dtype))
        self.register_buffer("scale", torch.full((1,), 0.5, dtype=dtype))

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            getattr(self, f"load_{name}")(tensor)

    def load_embed(self, tensor) -> None:
        self.embed[:VOCAB].data.copy_(tensor)
        self.embed[VOCAB:].data.fill_(0)

    def load_head(self, tensor) -> None:
        """Skipped: tied."""

    def load_q(self, tensor) -> None:
        self.qkv.data.narrow(0, 0, 4).copy_(tensor)

    def load_k(self, tensor) -> None:
        self.seen_k = tensor[0]
        self.qkv.data.narrow(0, 4, 2).copy_(tensor)

    def load_v(self, tensor) -> None:
        self.qkv.data.narrow(0, 6, 2).copy_(tensor)

    def load_out(self, tensor) -> None:
        for rank, shard in enumerate(self.out):
            shard.data.copy_(tensor.narrow(1, 3 * rank, 3))

    def load_norm(self, tensor) -> None:
        self.norm.data.zero_()
        self.norm.data.copy_(tensor)

    def load_scale(self, tensor) -> None:
        self.scale.copy_(tensor.view(1))


def meta(shapes=CHECKPOINT, dtype=torch.bfloat16):
    return {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}


def memory(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def record(model, **tensors):
    """Routes of a model of which every tensor has one."""
    found = recorded(model, **tensors)
    assert not found.whole
    return found.routed


def recorded(model, *, shard=False, **tensors):
    return record_routes(model, load=model.load_weights, tensors=tensors or meta(), shard=shard)


def entry_of(target, dtype="BF16", *, start=0, length=None):
    length = math.prod(target.shape) - start if length is None else length
    return TensorEntry(name=target.name, dtype=dtype, shape=target.shape, mode="dense", part=0, offset=0, bytes=0, start=start,
                       length=length, count=length)


def bits(values: torch.Tensor) -> np.ndarray:
    return values.contiguous().reshape(-1).view({2: torch.int16, 4: torch.int32}[values.element_size()]).numpy().view(
        f"u{values.element_size()}")
