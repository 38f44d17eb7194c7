"""What a receiver does before the pause, and what several ranks of one engine say of the same version."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncrl.errors import WeightSyncError, WrongBase
from asyncrl.weights import receiver as receiver_module
from asyncrl.weights.receiver import Receiver, joined
from asyncrl.weights.targets import MemoryTarget
from asyncrl.weights.torch_pieces import memory_targets


def held(targets):
    return {name: tensor.view(torch.uint8).numpy().tobytes() for name, tensor in targets.items()}


def test_fetching_gives_the_state_that_would_result_and_writes_nothing(synced):
    rig, targets, receiver = synced
    rig.change(0.4)
    one = rig.publish(1, base=0)
    before = held(targets)
    assert joined([receiver.fetch(one)]) == one.state_hash
    assert (receiver.version, held(targets)) == (0, before)
    assert receiver.apply(one) == one.state_hash
    assert rig.holds(targets)


def test_what_was_fetched_is_applied_without_the_store(synced, monkeypatch):
    rig, targets, receiver = synced
    rig.change(0.4)
    one = rig.publish(1, base=0)
    receiver.fetch(one)
    monkeypatch.setattr(rig.store, "parts", None)
    monkeypatch.setattr(rig.store, "chain", None)
    receiver.apply(one)
    assert rig.holds(targets)


def test_changes_too_large_to_be_kept_are_decoded_again(synced, monkeypatch):
    rig, targets, receiver = synced
    monkeypatch.setattr(receiver_module, "KEPT_BYTES", 0)
    for version in (1, 2, 3):
        rig.change(0.4)
        newest = rig.publish(version, base=version - 1)
    receiver.fetch(newest)
    receiver.apply(newest)
    assert rig.holds(targets)


def test_a_newer_version_takes_the_place_of_one_that_was_fetched(synced):
    rig, targets, receiver = synced
    rig.change(0.4)
    one = rig.publish(1, base=0)
    receiver.fetch(one)
    rig.change(0.4)
    two = rig.publish(2, base=1)
    assert joined([receiver.fetch(two)]) == two.state_hash
    receiver.apply(two)
    assert rig.holds(targets)
    with pytest.raises(WrongBase, match="versions only grow"):
        receiver.apply(one)


def test_what_was_fetched_on_an_older_version_is_fetched_again(synced):
    rig, targets, receiver = synced
    rig.change(0.4)
    one = rig.publish(1, base=0)
    rig.change(0.4)
    two = rig.publish(2, base=1)
    receiver.fetch(two)
    receiver.apply(one)
    assert receiver.apply(two) == two.state_hash
    assert rig.holds(targets)


def test_memory_changed_between_fetching_and_applying_is_found_by_the_audit(synced):
    rig, targets, receiver = synced
    rig.change(0.4)
    one = rig.publish(1, base=0)
    receiver.fetch(one)
    untouched = np.flatnonzero(rig.state["embed.weight"] == rig.store.parts(rig.store.manifest(0))[0].view(np.uint16)[:280])[0]
    targets["embed.weight"].view(-1)[untouched] += 1.0
    receiver.apply(one)
    with pytest.raises(WeightSyncError, match="memory hashes to"):
        receiver.audit()


def test_ranks_that_share_a_tensor_add_up_and_copies_count_once(rig):
    # two ranks: each has a tensor of its own, both have a copy of the third
    names = [piece.name for piece in rig.pieces]
    own = [Receiver(Owning(rig.targets(), names={name, names[1]}).targets, source=rig.store, classes={names[1]: "0,1"})
           for name in (names[0], names[2])]
    for version in range(3):
        rig.change(0.4)
        manifest = rig.publish(version, base=version - 1 if version else None)
        shares = [receiver.fetch(manifest) for receiver in own]
        assert [sorted(share) for share in shares] == [["", "0,1"], ["", "0,1"]]
        assert joined(shares) == manifest.state_hash
        for receiver in own:
            assert receiver.apply(manifest, predicted=joined(shares)) == manifest.state_hash
        assert joined([receiver.audit() for receiver in own]) == manifest.state_hash


def test_a_rank_alone_refuses_what_it_cannot_prove_alone(rig):
    first = rig.pieces[0].name
    receiver = Receiver(Owning(rig.targets(), names={first}).targets, source=rig.store)
    with pytest.raises(WeightSyncError, match="would lead to state"):
        receiver.apply(rig.publish(0, base=None))
    assert (receiver.version, receiver.poisoned) == (None, "")


def test_copies_that_differ_are_refused_before_the_first_write():
    with pytest.raises(WeightSyncError, match=r"ranks 0,1 each have a copy differ: rank 0 has state 0{15}7, rank 1 0{15}8"):
        joined([{"": 1, "0,1": 7}, {"": 2, "0,1": 8}])
    assert joined([{"": 1, "0,1": 7}, {"": 2**64 - 1, "0,1": 7}, {"": 5}]) == 12


class Owning:
    """Targets of a whole model, of which this rank holds some tensors and nothing of the others."""

    def __init__(self, tensors: dict[str, torch.Tensor], *, names: set[str]) -> None:
        self.targets = {name: target if name in names else Nothing(target) for name, target in memory_targets(tensors).items()}


class Nothing:
    """A tensor of which another rank holds every element."""

    def __init__(self, target: MemoryTarget) -> None:
        self.name, self.shape, self.dtype, self.accepts = target.name, target.shape, target.dtype, target.accepts

    def here(self, entry, changes):
        return ()
