from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch import nn

from asyncrl.errors import WeightSyncError
from asyncrl.weights.codec import Changes
from asyncrl.weights.receiver import Receiver, joined
from tests.weights.loaders import CHECKPOINT, HIDDEN, VOCAB, Fused, bits, entry_of, memory, meta, record, recorded


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


def load_twice(model, tensor):
    model.norm.data.copy_(tensor)
    model.spare.data.copy_(tensor)


def clone_where_another_is(model, tensor):
    model.qkv.data[0].copy_(tensor.clone())


def mix(model, tensor):
    model.norm.data.copy_(tensor + model.seen_k)


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
        tensor.sum().item()
    except Exception:
        model.norm.data.copy_(tensor)


@pytest.mark.parametrize(("load", "reason"), [
    (cast_through_a_temporary, r"its loader passes it through other memory \(aten._to_copy"),
    (clone, r"its loader passes it through other memory \(aten.clone"),
    (stage, r"its loader passes it through other memory \(aten.copy_"),
    (negate_in_place, r"its loader passes it through other memory \(aten.neg_"),
    (load_half, "its loader places 2 of its 4 elements"),
    (load_twice, "its loader puts some of its elements in two places"),
    (spread, r"one element is copied to several places, or several to one \(norm\)"),
])
def test_what_a_loader_does_more_than_copy_has_to_be_loaded_whole(load, reason):
    model = broken(load)
    before = memory(model)
    found = recorded(model)
    assert list(found.whole) == ["norm"]
    assert re.match(reason, found.whole["norm"])
    assert set(found.routed) == set(CHECKPOINT) - {"norm"}
    assert all(torch.equal(before[name], tensor) for name, tensor in memory(model).items())


@pytest.mark.parametrize(("load", "reason"), [
    (load_to_two_places, "q: its loader writes where another tensor|norm: its loader writes where another tensor"),
    (load_where_another_is, "its loader writes where another tensor"),
    (clone_where_another_is, "its loader writes where another tensor"),
    (mix, "norm and k: its loader puts what it computes from all of them into norm"),
    (add_in_place, "norm: the loader changes norm with aten.add_"),
    (scale_what_is_there, "norm: the loader changes norm with aten.mul_"),
    (replace, "norm: its loader replaces memory"),
    (rebind, "norm: its loader replaces memory"),
    (write_elsewhere, "norm: its loader writes, with aten.copy_.default, memory that is no parameter"),
    (look_at_values, r"norm: its loader computes with it \(aten._local_scalar_dense"),
    (copy_something_else, "norm: the loader changes norm"),
    (fail, "norm: the model's own loader failed: AssertionError: wrong shape"),
    (swallow, "norm: its loader computes with it"),
])
def test_a_loader_whose_result_nobody_can_prove_is_refused_by_name_and_changes_nothing(load, reason):
    model = broken(load)
    held = model.norm, memory(model)
    with pytest.raises(WeightSyncError, match=reason):
        record(model)
    if load not in (replace, rebind):
        assert model.norm is held[0]
        assert all(torch.equal(held[1][name], tensor) for name, tensor in memory(model).items())
    assert not KEPT.any()


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
