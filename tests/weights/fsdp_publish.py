"""One rank of `test_fsdp`: publishes an anchor and deltas of a small model, sharded, replicated, and on rank 0 whole.

Run as RANK WORLD FOLDER.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from asyncrl.weights.manifest import RankPublication, merge
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.store import StoreTransport
from asyncrl.weights.torch_pieces import local_bits, local_pieces


class Model(nn.Module):
    """Tied head, rows that two ranks cannot share evenly, one row, buffers, and a parameter FSDP leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.up = nn.Linear(4, 7)
        self.down = nn.Linear(7, 1)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight
        self.ignored = nn.Parameter(torch.randn(3, 2))
        self.register_buffer("scale", torch.randn(5))
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("scratch", torch.randn(2), persistent=False)


def train(model: nn.Module) -> None:
    """An update that depends on each element alone, so that it is the same however the model is sharded."""
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.copy_(torch.where(local.abs() > 0.3, local * 1.01, local))
        model.steps += 1


def publish_versions(model: nn.Module, *, rank: int, world: int, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    store = StoreTransport(folder / "weights")
    publisher = Publisher(local_pieces(model, rank=rank, dtype="bfloat16"), rank=rank, sink=store)
    for version, base in ((0, None), (1, 0), (2, 1), (3, 2)):
        publication = publisher.publish(local_bits(model, rank=rank, dtype="bfloat16"), version=version, base=base)
        (folder / f"rank{rank}-v{version}.json").write_text(json.dumps(publication.to_wire()))
        barrier(world)
        if rank == 0:
            wires = [json.loads((folder / f"rank{other}-v{version}.json").read_text()) for other in range(world)]
            store.commit(merge([RankPublication.from_wire(wire) for wire in wires], run_epoch=0, version=version, base=base))
        barrier(world)
        publisher.committed(version)
        train(model)


def barrier(world: int) -> None:
    if world > 1:
        dist.barrier()


def sharded(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    model = Model()
    fully_shard(model, mesh=mesh, ignored_params={model.ignored})
    return model


def main() -> None:
    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    if rank == 0:
        torch.manual_seed(0)
        publish_versions(Model(), rank=0, world=1, folder=folder / "whole")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world, timeout=timedelta(seconds=30))
    for kind, shape, names in (("shard", (world,), ("shard",)), ("replicate", (world, 1), ("replicate", "shard"))):
        publish_versions(sharded(init_device_mesh("cpu", shape, mesh_dim_names=names)), rank=rank, world=world, folder=folder / kind)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
