"""What a step computes, and how much its device could: the two halves of MFU."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

import torch

from asyncrl.metrics import Metrics
from asyncrl.plan.hardware import HARDWARE
from asyncrl.train.minibatch import Minibatch
from asyncrl.train.trainee import Trainee

_SIDE, _TRIALS = 1024, 4
"""Of the matrices that a CPU multiplies to show its peak: 2 GFLOP a product, long enough for every thread to have a share."""


def work_metrics(trainee: Trainee, minibatches: Sequence[Minibatch]) -> Metrics:
    """`train/flop/sum`: of this rank's tokens, 2 operations a weight in a forward, backward two forwards, by `ModelFlops`; attention over
    the context is left out, as is a critic. `train/peak_flop_s/last`: what its device could do; absent where nothing tells.
    """
    cost, config = trainee.policy.flops, trainee.config
    forwards = config.has_proximal_pass + (trainee.reference is not None) + 3 * config.trainer.epochs
    inputs = [inputs for minibatch in minibatches for inputs in minibatch.inputs]
    flop = sum(cost.token * len(each.tokens) + cost.prediction * len(each.places) for each in inputs)
    metrics = Metrics()
    metrics.sum("train/flop/sum", forwards * flop)
    peak = peak_flop_s(trainee.ranks.device, threads=torch.get_num_threads())
    if peak is not None:
        metrics.last("train/peak_flop_s/last", peak)
    return metrics


@functools.lru_cache
def peak_flop_s(device: torch.device, *, threads: int) -> float | None:
    """FLOP/s: a GPU's from its data sheet, dense bf16; a CPU's the fastest of a few float32 products on so many threads, measured once.

    None for a device that is in no table.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device).lower()
        return next((machine.peak_flop_s for known, machine in HARDWARE.items() if known in name), None)
    if device.type != "cpu":
        return None
    left = torch.ones(_SIDE, _SIDE)
    fastest_s = float("inf")
    for _ in range(_TRIALS):
        began_s = time.perf_counter()
        left @ left
        fastest_s = min(fastest_s, time.perf_counter() - began_s)
    return 2.0 * _SIDE**3 / fastest_s
