"""A process group of its own for one kind of traffic: made from a file, on loopback, and ended without asking the others."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

Backend = Literal["nccl", "gloo"]


class Group:
    """Members of a broadcast; not the default group, nor any part of it.

    Args:
        meeting: a file that no group had before, where only this run's processes can read and write.
        device: of the tensors that are sent; nccl is for those of a GPU that no other member has.

    Raises RuntimeError, here and later, when a member is not there, dies, or takes longer than `timeout_s`.
    """

    def __init__(self, meeting: Path, *, rank: int, size: int, backend: Backend, device: torch.device, timeout_s: float) -> None:
        self._limit = timedelta(seconds=timeout_s)
        store = dist.FileStore(str(meeting), size)
        store.set_timeout(self._limit)
        self._backend: dist.Backend
        if backend == "nccl":
            torch.cuda.set_device(device)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = self._limit
            self._backend = dist.ProcessGroupNCCL(store, rank, size, nccl)
        else:
            gloo = dist.ProcessGroupGloo._Options()
            gloo._timeout = self._limit
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            self._backend = dist.ProcessGroupGloo(store, rank, size, gloo)

    def broadcast(self, tensor: Tensor, *, root: int) -> None:
        """Have every member's `tensor` hold what the root's does. Returns when it is there."""
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = root, self._limit
        if not self._backend.broadcast([tensor], options).wait(self._limit):
            raise RuntimeError("a broadcast did not end")

    def abort(self) -> None:
        """End it, whatever the others do; they see it as a death."""
        self._backend.abort()
