"""What a receiver's memory and a publisher's snapshot do with bits that are equal as numbers, or that nobody published."""

import functools

import pytest
import torch
from torch import nn

from asyncrl.errors import WeightSyncError
from asyncrl.weights import targets as targets_module
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.receiver import Receiver
from asyncrl.weights.store import StoreTransport
from asyncrl.weights.torch_pieces import local_bits, local_pieces, memory_targets
from asyncrl.weights.torch_snapshot import DeviceSnapshot


def test_an_anchor_heals_float32_memory_that_holds_more_than_bfloat16_can_say(rig):
    targets = {name: torch.full_like(tensor, 0.1) for name, tensor in rig.targets(torch.float32).items()}
    receiver = Receiver(memory_targets(targets), source=rig.store)
    receiver.apply(rig.publish(0, base=None))
    assert rig.holds(targets)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_memory_that_does_not_take_what_is_written_is_found_at_once_and_poisons(rig, dtype, monkeypatch):
    targets = rig.targets(dtype)
    receiver = Receiver(memory_targets(targets), source=rig.store)
    receiver.apply(rig.publish(0, base=None))
    rig.change(0.5)
    delta = rig.publish(1, base=0)
    with monkeypatch.context() as patch:
        patch.setattr(targets_module, "put", lambda memory, changes: None)
        with pytest.raises(WeightSyncError, match="does not hold what was written"):
            receiver.apply(delta)
    assert (receiver.version, receiver.poisoned) == (None, "writing version 1 did not finish")
    receiver.apply(rig.anchor())
    assert rig.holds(targets)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("snapshot", [None, functools.partial(DeviceSnapshot, device=torch.device("cpu"))], ids=["host", "device"])
def test_a_zero_that_changes_its_sign_alone_is_published(tmp_path, dtype, snapshot):
    model = nn.Linear(8, 4, bias=False)
    nn.init.zeros_(model.weight)
    publisher = Publisher(local_pieces(model, rank=0, dtype=dtype), rank=0, sink=StoreTransport(tmp_path), snapshot=snapshot)
    publisher.publish(local_bits(model, rank=0, dtype=dtype), version=0, base=None)
    publisher.committed(0)
    with torch.no_grad():
        model.weight[1, 2] = -0.0
    assert [entry.count for entry in publisher.publish(local_bits(model, rank=0, dtype=dtype), version=1, base=0).entries] == [1]
