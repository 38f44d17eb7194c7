"""Several versions read as one: for every run of a tensor the union of their changes, the last writer of an element winning. NumPy only."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from asyncrl.weights.codec import Changes, decode
from asyncrl.weights.manifest import Manifest, TensorEntry

Run = tuple[TensorEntry, Changes]
"""A run of a tensor and what changes in it; of the entry, name, dtype, shape, start and length count."""


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """One version and the bytes of its parts."""

    manifest: Manifest
    parts: Sequence[NDArray[np.uint8]]

    def changes(self, entry: TensorEntry) -> Changes:
        """Decoded and checked. Raises WeightSyncError."""
        payload = self.parts[entry.part][entry.offset:entry.offset + entry.bytes]
        return decode(payload, mode=entry.mode, dtype=entry.dtype, length=entry.length, count=entry.count)


def merged_runs(links: Sequence[Link]) -> Iterator[Run]:
    """What `links`, oldest first, change together; runs do not overlap. One at a time is in memory. Raises WeightSyncError."""
    if len(links) == 1:
        link, = links
        yield from ((entry, link.changes(entry)) for entry in link.manifest.tensors)
        return
    by_name: defaultdict[str, list[tuple[Link, TensorEntry]]] = defaultdict(list)
    for link in links:
        for entry in link.manifest.tensors:
            by_name[entry.name].append((link, entry))
    for found in by_name.values():
        yield from _merged(found)


def _merged(found: list[tuple[Link, TensorEntry]]) -> Iterator[Run]:
    """Ranks may have cut the tensor otherwise in one version than in another: every edge is an edge of the runs that come out."""
    edges = sorted({edge for _, entry in found for edge in (entry.start, entry.start + entry.length)})
    decoded: dict[int, Changes] = {}
    for low, high in pairwise(edges):
        covering = [place for place, (_, entry) in enumerate(found) if entry.start <= low and high <= entry.start + entry.length]
        if not covering:
            continue
        for place in [place for place in decoded if place not in covering]:
            del decoded[place]
        for place in covering:
            if place not in decoded:
                link, entry = found[place]
                decoded[place] = link.changes(entry)
        layers = [within(decoded[place], low - found[place][1].start, high - low) for place in covering]
        entry = found[covering[-1]][1]
        yield dataclasses.replace(entry, start=low, length=high - low), _union(layers, length=high - low)


def within(changes: Changes, start: int, length: int) -> Changes:
    """Those of the elements start … start + length of a run, counted from there."""
    if changes.indices is None:
        return Changes(None, changes.values[start:start + length])
    low, high = np.searchsorted(changes.indices, (start, start + length))
    return Changes(changes.indices[low:high] - start, changes.values[low:high])


def _union(layers: Sequence[Changes], *, length: int) -> Changes:
    """Of changes of the same `length` elements, oldest first."""
    whole = max((place for place, layer in enumerate(layers) if layer.indices is None), default=None)
    if whole is not None:
        later = layers[whole + 1:]
        values = layers[whole].values.copy() if later else layers[whole].values
        for layer in later:
            values[layer.selection] = layer.values
        return Changes(None, values)
    if len(layers) == 1:
        return layers[0]
    indices = np.concatenate([layer.indices for layer in layers if layer.indices is not None])
    values = np.concatenate([layer.values for layer in layers])
    order = np.argsort(indices, kind="stable")
    ordered = indices[order]
    last = np.append(ordered[1:] != ordered[:-1], True)[:len(ordered)]
    return Changes(ordered[last], values[order][last])
