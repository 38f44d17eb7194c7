from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import WeightSyncError
from asyncrl.weights import routed_target
from asyncrl.weights.codec import Changes
from asyncrl.weights.routed_target import Box, Layout, RoutedTarget, box_between, overlapping
from tests.weights.loaders import Fused, bits, entry_of, record


def test_bf16_in_float32_leaves_the_lower_half_zero_and_notices_when_it_is_not():
    model = Fused(torch.float32)
    target = record(model)["k"]
    special = np.array([0x8000, 0x7FC1, 0xFF80, 0x0001], np.uint16)  # −0.0, a NaN with a payload, −inf, the least subnormal
    changes = Changes(np.array([0, 3, 4, 7]), special)
    target.write(entry_of(target), changes)
    assert target.read(entry_of(target), changes).tolist() == special.tolist()
    assert bits(model.qkv.data)[[16, 19, 20, 23]].tolist() == (special.astype(np.uint32) << 16).tolist()
    model.qkv.data.view(torch.int32)[4, 3] += 1
    with pytest.raises(WeightSyncError, match="k holds values that are no BF16"):
        target.read(entry_of(target), changes)


def test_memory_that_does_not_take_a_write_is_noticed(monkeypatch):
    target = record(Fused(torch.bfloat16))["k"]
    monkeypatch.setattr(routed_target, "put", lambda *arguments: None)
    with pytest.raises(WeightSyncError, match="k does not hold what was written"):
        target.write(entry_of(target), Changes(np.array([1]), np.array([7], np.uint16)))


@st.composite
def blocks(draw):
    """A checkpoint tensor cut into a grid of blocks, each put somewhere, perhaps transposed, into memory with gaps."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    cuts = [sorted({0, size} | set(draw(st.lists(st.integers(0, size), max_size=2)))) for size in shape]
    return shape, cuts, draw(st.permutations(range(len(shape)))), draw(st.integers(0, 3)), draw(st.randoms(use_true_random=False))


def cut(tensor, cuts):
    pieces = [tensor]
    for dim, edges in enumerate(cuts):
        pieces = [piece.narrow(dim, low, high - low) for piece in pieces for low, high in pairwise(edges)]
    return pieces


@settings(deadline=None, max_examples=150)
@given(blocks(), st.sampled_from([torch.bfloat16, torch.float32]))
def test_random_boxes_read_what_was_written_and_touch_nothing_else(drawn, dtype):
    shape, cuts, order, gap, random = drawn
    whole = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    storage = torch.arange(2 * math.prod(shape) + gap * 40 + 40).to(dtype)
    views, boxes, end = [], [], gap
    for piece in cut(whole, cuts):
        sizes = [piece.shape[dim] for dim in order]
        row = sizes[-1] + gap if len(sizes) > 1 else sizes[-1]
        strides = [math.prod(sizes[dim + 1:-1]) * row if dim < len(sizes) - 1 else 1 for dim in range(len(sizes))]
        span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        if end + span > len(storage):
            storage.resize_(end + span).copy_(torch.arange(end + span))
        views.append((piece, sizes, strides, end))
        end += span
    for piece, sizes, strides, offset in views:
        destination = storage.as_strided(sizes, strides, offset).permute([order.index(dim) for dim in range(len(order))])
        boxes.append(box_between(piece, destination))
    assert overlapping([(box.sizes, box.runtime) for box in boxes]) is None
    assert overlapping([(box.sizes, box.checkpoint) for box in boxes]) is None
    random.shuffle(boxes)
    target = RoutedTarget(name="x", shape=tuple(shape), dtype="BF16" if dtype == torch.bfloat16 else "F32", boxes=tuple(boxes))

    generator = np.random.default_rng(random.randrange(1 << 30))
    values = generator.integers(0, 1 << 16, math.prod(target.shape), dtype=np.uint16)
    before = bits(storage).copy()
    target.write(entry_of(target), Changes(None, values))
    words = values if dtype == torch.bfloat16 else values.astype(np.uint32) << 16
    expected = torch.from_numpy(before.view(f"i{before.itemsize}").copy())
    for (_, sizes, strides, offset), piece in zip(views, cut(torch.from_numpy(words.view(f"i{words.itemsize}")).reshape(shape), cuts),
                                                  strict=True):
        expected.as_strided(sizes, strides, offset).copy_(piece.permute(order))
    assert np.array_equal(bits(storage), expected.numpy().view(before.dtype))

    start = int(generator.integers(0, math.prod(target.shape)))
    length = int(generator.integers(1, math.prod(target.shape) - start + 1))
    chosen = np.sort(generator.permutation(length)[: int(generator.integers(0, length + 1))]).astype(np.int64)
    changes = Changes(chosen, generator.integers(0, 1 << 16, len(chosen), dtype=np.uint16))
    target.write(entry_of(target, start=start, length=length), changes)
    values[start + chosen] = changes.values
    assert target.read(entry_of(target), Changes(None, values)).tolist() == values.tolist()
    assert target.read(entry_of(target, start=start, length=length), changes).tolist() == changes.values.tolist()
    inside = np.zeros(len(before), np.bool_)
    for _, sizes, strides, offset in views:
        torch.from_numpy(inside).as_strided(sizes, strides, offset).fill_(True)
    assert np.array_equal(bits(storage)[~inside], before[~inside])


def test_interleaved_blocks_are_disjoint_unless_an_element_is_shared():
    columns = torch.empty(4, 6)
    def left_and(right):
        return [box_between(torch.empty(part.shape, device="meta"), part) for part in (columns[:, :3], right)]
    assert overlapping([(box.sizes, box.runtime) for box in left_and(columns[:, 3:])]) is None
    assert overlapping([(box.sizes, box.runtime) for box in left_and(columns[:, 2:])]) is not None
    with pytest.raises(WeightSyncError, match="several to one"):
        box_between(torch.empty(3, 2, device="meta"), columns.as_strided((3, 2), (1, 1)))


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=3), st.integers(0, 9))
def test_counting_the_elements_of_a_box_agrees_with_listing_them(dimensions, offset):
    sizes = tuple(size for size, _ in dimensions)
    strides, reach = [], 1
    for size, gap in reversed(dimensions):
        strides.append(reach * gap)
        reach *= size * gap
    layout = Layout(offset, tuple(reversed(strides)))
    box = Box(sizes, layout, layout, torch.empty(0))
    listed = [offset + sum(c * s for c, s in zip(place, layout.strides, strict=True)) for place in np.ndindex(*sizes)]
    assert box.indices(0, box.elements).tolist() == listed == sorted(listed)
    assert [box.before(index) for index in range(offset + reach + 2)] == [
        sum(found < index for found in listed) for index in range(offset + reach + 2)]
    assert all(box.indices(first, last).tolist() == listed[first:last]
               for first in range(box.elements) for last in range(first, box.elements))
