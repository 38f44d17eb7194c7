"""Several versions read as one: what a NumPy array holds after all of them were applied one after another."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import WeightSyncError
from asyncrl.weights.codec import EVERYWHERE
from asyncrl.weights.manifest import Manifest, Part, TensorEntry
from asyncrl.weights.merge import Link, merged_runs
from tests.weights.codec_oracle import encode

MODES = ("blk16", "bitmap", "dense")
ELEMENTS = 60


def link(states: dict[str, tuple[np.ndarray, np.ndarray]], *, cuts: list[int], modes: list[str], version: int) -> Link:
    """A version that leads from the first to the second state of each tensor, in runs with these edges, each in a mode of its own."""
    entries, payloads, offset = [], [], 0
    for name, (old, new) in states.items():
        edges = [0, *sorted(set(cuts)), ELEMENTS]
        for place, (low, high) in enumerate(pairwise(edges)):
            indices = np.flatnonzero(old[low:high] != new[low:high])
            mode = modes[place % len(modes)]
            payloads.append(encode(new[low:high], indices, mode=mode))
            size = len(payloads[-1])
            entries.append(TensorEntry(name=name, dtype="BF16", shape=(ELEMENTS,), mode=mode, part=0, offset=offset, bytes=size,
                                       start=low, length=high - low, count=len(indices)))
            offset += size
    part = np.frombuffer(b"".join(payloads), np.uint8)
    manifest = Manifest(run_epoch=0, version=version, base=version - 1, parts=(Part(path="part", bytes=len(part), xxh3=""),),
                        tensors=tuple(entries), state_hash=0)
    return Link(manifest, [part])


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[dict[str, np.ndarray]], list[Link]]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    states = [{name: rng.integers(0, 4, ELEMENTS, dtype=np.uint16) for name in "ab"}]
    links = []
    for version in range(1, draw(st.integers(2, 5)) + 1):
        density = draw(st.sampled_from([0.0, 0.05, 0.5, 1.0]))
        states.append({name: np.where(rng.random(ELEMENTS) < density, rng.integers(0, 4, ELEMENTS, dtype=np.uint16), bits)
                       for name, bits in states[-1].items()})
        names = draw(st.sampled_from(["ab", "a", "ba"]))
        states[-1] |= {name: states[-2][name] for name in "ab" if name not in names}
        cuts = draw(st.lists(st.integers(1, ELEMENTS - 1), max_size=3))
        links.append(link({name: (states[-2][name], states[-1][name]) for name in names}, cuts=cuts,
                          modes=draw(st.lists(st.sampled_from(MODES), min_size=1, max_size=3)), version=version))
    return states, links


@given(chains())
def test_the_union_is_what_applying_one_after_another_gives(chain):
    states, links = chain
    held = {name: bits.copy() for name, bits in states[0].items()}
    seen = {name: np.zeros(ELEMENTS, np.int64) for name in held}
    for entry, changes in merged_runs(links):
        run = slice(entry.start, entry.start + entry.length)
        held[entry.name][run][changes.selection] = changes.values
        seen[entry.name][run] += 1
        if changes.indices is not None:
            assert np.all(changes.indices[1:] > changes.indices[:-1])
            assert len(changes.indices) == len(changes.values)
    assert all(np.array_equal(held[name], states[-1][name]) for name in held)
    assert all(count.max() <= 1 for count in seen.values())


def test_a_value_that_comes_and_goes_is_named_once_with_its_last_bits():
    old, between = np.zeros(ELEMENTS, np.uint16), np.zeros(ELEMENTS, np.uint16)
    between[[3, 50]] = 7
    links = [link({"a": (old, between)}, cuts=[], modes=["blk16"], version=1),
             link({"a": (between, old)}, cuts=[], modes=["bitmap"], version=2)]
    ((entry, changes),) = merged_runs(links)
    assert (entry.start, entry.length) == (0, ELEMENTS)
    assert changes.indices.tolist() == [3, 50]
    assert changes.values.tolist() == [0, 0]


def test_one_version_is_read_as_it_is():
    old = np.zeros(ELEMENTS, np.uint16)
    one = link({"a": (old, old + np.uint16(1))}, cuts=[10], modes=["dense", "blk16"], version=1)
    runs = list(merged_runs([one]))
    assert [entry for entry, _ in runs] == list(one.manifest.tensors)
    assert [changes.indices is EVERYWHERE.indices for _, changes in runs] == [True, False]


def test_a_damaged_payload_of_any_version_is_refused():
    old = np.zeros(ELEMENTS, np.uint16)
    good = link({"a": (old, old + np.uint16(1))}, cuts=[], modes=["blk16"], version=1)
    manifest = dataclasses.replace(good.manifest, tensors=tuple(dataclasses.replace(entry, count=entry.count - 1)
                                                                for entry in good.manifest.tensors))
    with pytest.raises(WeightSyncError, match="must have"):
        list(merged_runs([good, Link(manifest, good.parts)]))
