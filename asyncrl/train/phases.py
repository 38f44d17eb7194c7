"""Seconds of a step by what they went to, on one rank."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from asyncrl.metrics import Metrics


class Phases:
    """Adds up times between two marks. On CUDA these are events of the stream, read once at the end: no wait is added to a step."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def of(self, phase: str) -> Iterator[None]:
        """What runs inside is `phase`; phases do not nest."""
        if self._is_cuda:
            began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            began.record()
            yield
            ended.record()
            self._events.append((phase, began, ended))
        else:
            began_s = time.perf_counter()
            yield
            self._seconds[phase] += time.perf_counter() - began_s

    def metrics(self) -> Metrics:
        """`train/PHASE_s/sum`. Waits for what was marked."""
        for phase, began, ended in self._events:
            ended.synchronize()
            self._seconds[phase] += began.elapsed_time(ended) / 1e3
        self._events.clear()
        found = Metrics()
        for phase, seconds in self._seconds.items():
            found.sum(f"train/{phase}_s/sum", seconds)
        return found
