"""The ranks of one trainer: process group, sharding, and the few reductions a step needs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from asyncrl.train.layers import layers_of
from asyncrl.train.model import Body
from asyncrl.train.parallel_config import ShardingConfig


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among its peers."""

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh | None
    """None: alone, without a process group."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place; every rank gets it."""
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def max(self, tensor: Tensor) -> Tensor:
        """Maximum over ranks, in place; every rank gets it."""
        return self._reduce(tensor, dist.ReduceOp.MAX)

    def close(self) -> None:
        """Leave the process group."""
        if self.mesh is not None:
            dist.destroy_process_group()

    def _reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        if self.world_size > 1:
            dist.all_reduce(tensor, op=op)
        return tensor


def connect(*, rank: int, world_size: int, rendezvous: Path | None, timeout_s: float) -> Ranks:
    """Meet the other ranks through a file that is new for this start; without one the rank is alone in its process.

    A collective that waits longer than `timeout_s` raises.
    """
    device = torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")
    if rendezvous is None:
        return Ranks(rank=0, world_size=1, device=device, mesh=None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.FileStore(str(rendezvous), world_size), rank=rank,
                            world_size=world_size, timeout=timedelta(seconds=timeout_s))
    return Ranks(rank=rank, world_size=world_size, device=device, mesh=init_device_mesh(device.type, (world_size,)))


def shard(model: Body, ranks: Ranks, *, compute_dtype: torch.dtype, settings: ShardingConfig) -> None:
    """Move the model to the rank's device; among others, shard every transformer layer, then the rest, in place.

    Master weights and the sums of their gradients stay float32, whatever computes and whatever travels. Parameters without gradient are
    sharded like the others.
    """
    model.to(ranks.device)
    if ranks.mesh is None:
        return
    mixed = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=getattr(torch, settings.reduce_dtype), cast_forward_inputs=False)
    layers = layers_of(model.lm)
    for layer in layers:
        fully_shard(layer, mesh=ranks.mesh, mp_policy=mixed, reshard_after_forward=settings.reshard_after_forward)
    fully_shard(model, mesh=ranks.mesh, mp_policy=mixed)
    if settings.prefetch_layers:
        _prefetch([model, *layers], depth=settings.prefetch_layers)


def release(model: nn.Module) -> None:
    """Give back what a forward without a backward pass leaves gathered: the root's weights, and with `reshard_after_forward` off all."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _prefetch(order: list[nn.Module], *, depth: int) -> None:
    """Each module gathers the next `depth` when it begins, and in the backward pass those before it; the root comes first and last."""
    for place, module in enumerate(order):
        module.set_modules_to_forward_prefetch(order[place + 1:place + 1 + depth])
        before = order[max(1, place - depth):place] if place else order[-depth:]
        module.set_modules_to_backward_prefetch([layer for layer in reversed(before) if layer is not module])


def local(tensor: Tensor) -> Tensor:
    """This rank's share of a tensor; the tensor itself when it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, gathered; every rank must call it."""
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
