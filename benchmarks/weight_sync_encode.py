"""Detection and encoding, beside `copy_` of the same model; and how many bytes that gives. Prints what it measured as JSON.

Run by `benchmarks.weight_sync`, as a process of its own, with one argument: what to measure, as JSON.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from asyncrl.weights import numpy_kernels, publisher
from asyncrl.weights.kernels import kernels_for
from asyncrl.weights.manifest import Manifest, Part, RankPublication
from asyncrl.weights.piece_bits import ArrayBits
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.transport import Buffer
from benchmarks.weight_sync_models import CONFIGS, LARGE_ELEMENTS, QUICK, State, initial_state

DENSITIES = (0.0005, 0.01, 0.03, 0.06, 0.1, 0.5, 1.0)
WAYS = {"numpy", "numba"}
FEWEST_ROUNDS, ENOUGH_S = 2, 10.0
"""Rounds that are always counted, and seconds after which no other is begun: NumPy takes half a minute where all of 0.5B changes."""


class Nowhere:
    """A sink that takes parts and forgets them: what is measured ends where writing begins."""

    def put_part(self, version: int, *, rank: int, bucket: int, chunks: Iterable[Buffer]) -> Part:
        """See `PartSink`."""
        return Part(path=f"{version}-{rank}-{bucket}", bytes=sum(memoryview(chunk).nbytes for chunk in chunks), xxh3="")

    def deliver(self, manifest: Manifest) -> None:
        """See `PartSink`."""


class Detection:
    """A publisher that goes to and fro between two states."""

    def __init__(self, states: tuple[State, State], *, kernels: ModuleType, threads: int) -> None:
        self._bits = [ArrayBits([(piece, state.bits[piece.name]) for piece in state.pieces]) for state in states]
        with patch.object(publisher, "kernels_for", lambda elements: kernels):
            self._publisher = Publisher(states[0].pieces, rank=0, sink=Nowhere(), threads=threads)
        self.found = self._publisher.publish(self._bits[0], version=0, base=None)
        self._publisher.committed(0)

    def once(self) -> float:
        """Seconds of one delta; what it found is in `found`."""
        base = self.found.version
        began_s = time.perf_counter()
        self.found = self._publisher.publish(self._bits[(base + 1) % 2], version=base + 1, base=base)
        seconds = time.perf_counter() - began_s
        self._publisher.committed(base + 1)
        return seconds


def copier(state: State) -> Callable[[], float]:
    """Seconds that torch takes to copy every tensor of the state into memory that is there already."""
    pairs = [(torch.empty_like(tensor).copy_(tensor), tensor) for tensor in state.tensors().values()]

    def once() -> float:
        began_s = time.perf_counter()
        for target, source in pairs:
            target.copy_(source)
        return time.perf_counter() - began_s

    return once


def measured(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Of one model, by density: seconds, share of the speed of a copy in the same rounds, bytes."""
    torch.set_num_threads(spec["threads"])
    state = initial_state((CONFIGS | QUICK)[spec["model"]]())
    copy_once = copier(state)
    compiled = kernels_for(1 << 40)
    rows = [_at(state, density, copy_once, compiled, threads=spec["threads"], rounds=spec["rounds"]) for density in DENSITIES]
    copy_s = min(row["copy_s"] for row in rows)  # the same copy at every density: the one least disturbed is what it takes
    for row in rows:
        for name in WAYS & row.keys():
            row[name]["share_of_copy"] = copy_s / row[name]["seconds"]
    return {"elements": state.elements, "published_bytes": state.nbytes, "compiled": compiled is not numpy_kernels, "copy_s": copy_s,
            "densities": rows}


def _at(state: State, density: float, copy_once: Callable[[], float], compiled: ModuleType, *, threads: int, rounds: int) -> dict[str, Any]:
    neighbour = state.changed(density)
    ways = {"numpy": numpy_kernels} | ({"numba": compiled} if compiled is not numpy_kernels else {})
    detections = {name: Detection((state, neighbour), kernels=kernels, threads=threads) for name, kernels in ways.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ("copy", *ways)}
    ends_s = time.perf_counter() + ENOUGH_S
    for number in range(rounds + 1):
        if number > FEWEST_ROUNDS and time.perf_counter() > ends_s:
            break
        turn = {"copy": copy_once()} | {name: detection.once() for name, detection in detections.items()}
        if number:  # the first warms up
            for name, found in turn.items():
                seconds[name].append(found)
    row: dict[str, Any] = {"density": state.density_to(neighbour), "asked": density, "copy_s": min(seconds["copy"]),
                           "copy_median_s": statistics.median(seconds["copy"])}
    for name in ways:
        row[name] = {"seconds": min(seconds[name]), "median_s": statistics.median(seconds[name])}
    return row | _bytes(detections["numpy"].found, state)


def _bytes(found: RankPublication, state: State) -> dict[str, Any]:
    large = [entry for entry in found.entries if math.prod(entry.shape) >= LARGE_ELEMENTS]
    sent, count = sum(part.bytes for part in found.parts), sum(entry.count for entry in large)
    return {"payload_bytes": sent, "bytes_per_change": sent / sum(entry.count for entry in found.entries),
            "bytes_per_change_large": sum(entry.bytes for entry in large) / count if count else None,
            "share_of_dense": sent / state.nbytes, "modes": sorted({entry.mode for entry in found.entries})}


if __name__ == "__main__":
    print("\n" + json.dumps(measured(json.loads(sys.argv[1]))))
