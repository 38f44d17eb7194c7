from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from asyncrl.errors import WeightSyncError
from asyncrl.weights.codec import Changes
from asyncrl.weights.manifest import TensorEntry
from asyncrl.weights.receiver import Receiver, joined
from asyncrl.weights.routed_target import RoutedTarget, box_between, overlapping
from asyncrl.weights.routes import record_routes

HIDDEN, VOCAB, PADDED = 4, 5, 8
CHECKPOINT = {"embed": (VOCAB, HIDDEN), "q": (4, HIDDEN), "k": (2, HIDDEN), "v": (2, HIDDEN), "out": (HIDDEN, 6), "norm": (HIDDEN,),
              "scale": ()}


class Fused(nn.Module):
    """A padded embedding, one projection for three, a row-parallel shard, a plain vector, and a head tied to the embedding."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.full((PADDED, HIDDEN), 0.5, dtype=dtype))
        self.head = self.embed
        self.qkv = nn.Parameter(torch.full((8, HIDDEN), 0.5, dtype=dtype))
        self.out = nn.ParameterList([torch.full((HIDDEN, 3), 0.5, dtype=dtype) for _ in range(2)])
        self.norm = nn.Parameter(torch.full((HIDDEN,), 0.5, dtype=dtype))
        self.register_buffer("scale", torch.full((1,), 0.5, dtype=dtype))

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            getattr(self, f"load_{name}")(tensor)

    def load_embed(self, tensor) -> None:
        self.embed[:VOCAB].data.copy_(tensor)
        self.embed[VOCAB:].data.fill_(0)

    def load_head(self, tensor) -> None:
        """Skipped: tied."""

    def load_q(self, tensor) -> None:
        self.qkv.data.narrow(0, 0, 4).copy_(tensor)

    def load_k(self, tensor) -> None:
        self.qkv.data.narrow(0, 4, 2).copy_(tensor)

    def load_v(self, tensor) -> None:
        self.qkv.data.narrow(0, 6, 2).copy_(tensor)

    def load_out(self, tensor) -> None:
        for rank, shard in enumerate(self.out):
            shard.data.copy_(tensor.narrow(1, 3 * rank, 3))

    def load_norm(self, tensor) -> None:
        self.norm.data.zero_()
        self.norm.data.copy_(tensor)

    def load_scale(self, tensor) -> None:
        self.scale.copy_(tensor.view(1))


def meta(shapes=CHECKPOINT, dtype=torch.bfloat16):
    return {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}


def memory(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def record(model, **tensors):
    return record_routes(model, load=model.load_weights, tensors=tensors or meta())


def entry_of(target, dtype="BF16", *, start=0, length=None):
    length = math.prod(target.shape) - start if length is None else length
    return TensorEntry(name=target.name, dtype=dtype, shape=target.shape, mode="dense", part=0, offset=0, bytes=0, start=start,
                       length=length, count=length)


def bits(values: torch.Tensor) -> np.ndarray:
    return values.contiguous().reshape(-1).view({2: torch.int16, 4: torch.int32}[values.element_size()]).numpy().view(
        f"u{values.element_size()}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_writing_through_the_routes_is_what_loading_does(dtype):
    values = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in CHECKPOINT.items()}
    loaded, patched = Fused(dtype), Fused(dtype)
    with torch.no_grad():
        loaded.load_weights(values.items())
        patched.embed[VOCAB:] = 0
    for name, target in record(patched).items():
        target.write(entry_of(target), Changes(None, bits(values[name])))
        assert np.array_equal(target.read(entry_of(target), Changes(None, bits(values[name]))), bits(values[name]))
    assert all(torch.equal(one, other) for one, other in zip(memory(loaded).values(), memory(patched).values(), strict=True))


def test_recording_writes_nothing():
    model = Fused(torch.bfloat16)
    before = memory(model)
    targets = record(model)
    assert set(targets) == set(CHECKPOINT)
    assert all(torch.equal(before[name], tensor) for name, tensor in memory(model).items())


def test_a_fused_layout_costs_no_index_and_a_shard_of_columns_has_two_boxes():
    targets = record(Fused(torch.bfloat16))
    assert {name: len(target.boxes) for name, target in targets.items() if not all(box.is_run for box in target.boxes)} == {"out": 2}
    (v,) = targets["v"].boxes
    assert (v.sizes, v.checkpoint.offset, v.runtime.offset) == ((8,), 0, 24)
    assert [(box.sizes, box.checkpoint.offset, box.checkpoint.strides, box.runtime.strides) for box in targets["out"].boxes] == [
        ((4, 3), 0, (6, 1), (3, 1)), ((4, 3), 3, (6, 1), (3, 1))]


def test_a_tensor_the_loader_skips_has_no_route():
    assert set(record(Fused(torch.bfloat16), **meta(CHECKPOINT | {"head": (VOCAB, HIDDEN)}))) == set(CHECKPOINT)


def test_a_checkpoint_of_another_dtype_is_routed_to_the_models_own():
    targets = record(Fused(torch.bfloat16), **meta(dtype=torch.float32))
    assert {target.dtype for target in targets.values()} == {"BF16"}


def broken(load):
    class Broken(Fused):
        load_norm = load
    return Broken(torch.bfloat16)


def cast_through_a_temporary(model, tensor):
    model.norm.data.copy_(tensor.to(torch.float32))


def clone(model, tensor):
    model.norm.data.copy_(tensor.clone())


def stage(model, tensor):
    staging = torch.empty(HIDDEN, dtype=torch.bfloat16)
    staging.copy_(tensor)
    model.norm.data.copy_(staging)


def negate_in_place(model, tensor):
    model.norm.data.copy_(tensor.neg_())


def load_half(model, tensor):
    model.norm.data[:2].copy_(tensor[:2])


def load_to_two_places(model, tensor):
    model.norm.data.copy_(tensor)
    model.qkv.data[0].copy_(tensor)


def load_where_another_is(model, tensor):
    model.qkv.data[0].copy_(tensor)


def spread(model, tensor):
    model.norm.data.copy_(tensor[:1])


def add_in_place(model, tensor):
    model.norm.data.add_(tensor)


def scale_what_is_there(model, tensor):
    model.norm.data.copy_(tensor)
    model.norm.data.mul_(2)


def replace(model, tensor):
    model.norm = nn.Parameter(tensor)


def rebind(model, tensor):
    model.norm.data = torch.zeros(HIDDEN, dtype=torch.bfloat16)


KEPT = torch.zeros(HIDDEN, dtype=torch.bfloat16)


def write_elsewhere(model, tensor):
    KEPT.copy_(tensor)


def look_at_values(model, tensor):
    if tensor.sum().item() > 0:
        model.norm.data.copy_(tensor)


def copy_something_else(model, tensor):
    model.norm.data.copy_(torch.ones(HIDDEN))


def fail(model, tensor):
    raise AssertionError("wrong shape")


def swallow(model, tensor):
    try:
        model.norm.data.copy_(tensor.clone())
    except Exception:
        model.norm.data.copy_(tensor)


@pytest.mark.parametrize(("load", "reason"), [
    (cast_through_a_temporary, r"norm: its loader passes it through other memory \(aten._to_copy"),
    (clone, r"norm: its loader passes it through other memory \(aten.clone"),
    (stage, r"norm: its loader passes it through other memory \(aten.copy_"),
    (negate_in_place, r"norm: its loader passes it through other memory \(aten.neg_"),
    (load_half, "norm: its loader places 2 of its 4 elements"),
    (load_to_two_places, "norm: its loader puts some of its elements in two places"),
    (load_where_another_is, "its loader writes where another tensor"),
    (spread, r"norm: one element is copied to several places, or several to one \(norm\)"),
    (add_in_place, "norm: the loader changes norm with aten.add_"),
    (scale_what_is_there, "norm: the loader changes norm with aten.mul_"),
    (replace, "norm: its loader replaces memory"),
    (rebind, "norm: its loader replaces memory"),
    (write_elsewhere, "norm: its loader writes, with aten.copy_.default, memory that is no parameter"),
    (look_at_values, r"norm: its loader computes with it \(aten._local_scalar_dense"),
    (copy_something_else, "norm: the loader changes norm"),
    (fail, "norm: the model's own loader failed: AssertionError: wrong shape"),
    (swallow, "norm: its loader passes it through other memory"),
])
def test_a_loader_that_does_more_than_copy_is_refused_by_name_and_changes_nothing(load, reason):
    model = broken(load)
    held = model.norm, memory(model)
    with pytest.raises(WeightSyncError, match=reason):
        record(model)
    if load not in (replace, rebind):
        assert model.norm is held[0]
        assert all(torch.equal(held[1][name], tensor) for name, tensor in memory(model).items())
    assert not KEPT.any()


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
    target = record(Fused(torch.bfloat16))["out"]
    monkeypatch.setattr(torch.Tensor, "index_copy_", lambda *arguments: None)
    with pytest.raises(WeightSyncError, match="out does not hold what was written"):
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_receiver_syncs_a_fused_model(rig, dtype):
    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            self.all = nn.Parameter(torch.full((44, 8), 0.5, dtype=dtype))

        def load_weights(self, weights):
            weights = dict(weights)
            self.all.data[:40, :7].copy_(weights["embed.weight"])
            self.all.data[40:43, :5].copy_(weights["up.weight"])
            self.all.data[43, 7:].copy_(weights["norm.weight"])

    model = Fused()
    targets = record(model, **{name: tensor.to("meta") for name, tensor in rig.targets().items()})
    receiver = Receiver(targets, source=rig.store)
    receiver.apply(rig.publish(0, base=None))
    for version, density in enumerate((0.0, 0.02, 0.4, 1.0), start=1):
        rig.change(density)
        assert receiver.apply(rig.publish(version, base=version - 1)) == joined([receiver.audit()])
        assert rig.holds({"embed.weight": model.all.data[:40, :7].contiguous(), "up.weight": model.all.data[40:43, :5].contiguous(),
                          "norm.weight": model.all.data[43, 7:].contiguous()})
    assert (model.all.data[:40, 7] == 0.5).all()
    model.all.data[0, 7] = 3.0  # padding is nobody's
    receiver.audit()
    model.all.data[0, 6] = 3.0
    with pytest.raises(WeightSyncError, match=r"memory hashes to|no BF16"):
        receiver.audit()
