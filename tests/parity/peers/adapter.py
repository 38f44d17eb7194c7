"""What every adapter shares: named computations over arrays, asked for by the process that started it. Needs NumPy and torch alone.

`python X_adapter.py FD PARENT_PID`. Each line on standard input is a request in JSON: a computation, its settings, the .npz files it reads
and writes, and for the benchmark how often to time it or whether to measure its memory. Each line on FD answers one. Arrays are never
pickled; standard output stays free for whatever a peer prints.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

Tensors = Mapping[str, torch.Tensor]
Settings = Mapping[str, Any]
Computation = Callable[[Tensors, Settings], dict[str, torch.Tensor]]

_PR_SET_PDEATHSIG = 1
_M_MMAP_THRESHOLD = -3
_WARM_UP = 3


def serve(computations: Mapping[str, Computation]) -> None:
    """Answer requests until standard input ends; gone with the parent, however that ends."""
    replies, parent = os.fdopen(int(sys.argv[1]), "w", encoding="utf-8"), int(sys.argv[2])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    for line in sys.stdin:
        try:
            reply = _answer(computations, json.loads(line))
        except Exception:
            reply = {"error": traceback.format_exc()}
        print(json.dumps(reply), file=replies, flush=True)
    os._exit(0)  # threads that a peer has started would hold up any other way out


def with_gradient(logprobs: torch.Tensor, loss: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    """The loss of current logprobs and its gradient, zeros where it has none."""
    current = logprobs.detach().requires_grad_()
    value = loss(current)
    value.backward()
    return {"loss": value.detach(), "gradient": torch.zeros_like(logprobs) if current.grad is None else current.grad}


def _answer(computations: Mapping[str, Computation], request: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(request["threads"])
    with np.load(request["input"], allow_pickle=False) as arrays:
        tensors = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    computation, settings = computations[request["computation"]], request["settings"]

    def run() -> dict[str, torch.Tensor]:
        return computation(tensors, settings)

    np.savez(request["output"], allow_pickle=False, **{name: value.detach().numpy() for name, value in run().items()})
    reply: dict[str, Any] = {}
    if request["repeats"]:
        reply["seconds"] = timed(run, request["repeats"])
    if request["memory"]:
        reply["peak_bytes"] = _peak_bytes(run)
    return reply


def timed(run: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each of `repeats` runs, after a few that are not counted."""
    for _ in range(_WARM_UP):
        run()
    seconds = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began_s)
    return seconds


def _peak_bytes(run: Callable[[], object]) -> int:
    """Resident memory at its highest during one run, over what it was before it.

    From here on glibc maps every larger block by itself, and what it has kept of freed ones is given back, so that resident memory is what
    is in use. Writing 5 to clear_refs starts the high mark anew.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, 1 << 16)
    run()
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS")
    run()
    return _status_bytes("VmHWM") - before


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
