"""One rank of an FSDP2 trainer that gathers its model and writes it whole. Run by `benchmarks.weight_sync_engine`, a process a rank.

Run as MODEL RANK RANKS MEETING SOURCE TARGET, the last three being files. It speaks `turns.py`: a turn that makes what SOURCE holds the
model's own weights, then one that is measured, and so on.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoModelForCausalLM

from asyncrl.weights.torch_pieces import checkpoint_tensors
from benchmarks.contestants import Contestant
from benchmarks.turns import Turns
from benchmarks.weight_sync_models import CONFIGS, QUICK

RANKS = 2


class Ranks:
    """All ranks, and what they do together. A context manager."""

    def __init__(self, model: str, *, folder: Path, source: Path, target: Path) -> None:
        self._stack, self._pool = ExitStack(), ThreadPoolExecutor(RANKS)
        commands = [[sys.executable, "-m", "benchmarks.weight_sync_gather", model, str(rank), str(RANKS), str(folder / "meeting"),
                     str(source), str(target)] for rank in range(RANKS)]
        started = [self._pool.submit(Contestant, command, threads=1, log=folder / f"rank{rank}.log")
                   for rank, command in enumerate(commands)]
        self._ranks = [self._stack.enter_context(one.result()) for one in started]

    def turn(self) -> None:
        """The next turn of all; waits for the last."""
        for done in [self._pool.submit(rank.turn) for rank in self._ranks]:
            done.result()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._pool.shutdown()


def take(model: nn.Module, source: Path, names: list[str]) -> None:
    """Make the values of a file the model's own, each rank its shards."""
    tensors = checkpoint_tensors(model)
    with torch.no_grad(), safe_open(source, "pt") as file:
        for name in names:
            tensor = tensors[name]
            assert isinstance(tensor, DTensor)
            local = tensor.to_local()
            shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            local.copy_(file.get_slice(name)[offset[0]:offset[0] + shape[0]])


def gather(model: nn.Module, names: list[str], *, rank: int) -> dict[str, Tensor]:
    """The whole model as published, on rank 0. Each shard is rounded first: half as much travels."""
    found: dict[str, Tensor] = {}
    tensors = checkpoint_tensors(model)
    for name in names:
        tensor = tensors[name]
        assert isinstance(tensor, DTensor)
        whole = tensor.bfloat16().full_tensor()
        if rank == 0:
            found[name] = whole
    return found


def publish(model: nn.Module, names: list[str], *, rank: int, target: Path) -> None:
    """Gather and write; nothing of it is kept."""
    found = gather(model, names, rank=rank)
    if rank == 0:
        save_file(found, target)
    dist.barrier()


def main() -> None:
    """Take turns until nobody asks any more."""
    name, rank, ranks, meeting, source, target = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *map(Path, sys.argv[4:])
    turns = Turns()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config((CONFIGS | QUICK)[name](), dtype=torch.float32)
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    model.to_empty(device="cpu")
    with safe_open(source, "pt") as file:
        names = list(file.keys())
    turns.ready()
    while True:
        turns.begin()
        take(model, source, names)
        turns.end()
        turns.begin()
        publish(model, names, rank=rank, target=target)
        turns.end()


if __name__ == "__main__":
    main()
