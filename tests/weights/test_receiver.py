import dataclasses
import shutil

import numpy as np
import pytest
import torch

from asyncrl.errors import WeightSyncError, WrongBase
from asyncrl.weights.manifest import Manifest, Packed
from asyncrl.weights.receiver import AUDIT_EVERY_DELTAS, Receiver, joined
from asyncrl.weights.store import StoreTransport
from asyncrl.weights.targets import MemoryTarget
from asyncrl.weights.torch_pieces import memory_targets
from asyncrl.weights.transport import HeldVersion


def snapshot(targets):
    return {name: tensor.view(torch.uint8).numpy().copy() for name, tensor in targets.items()}


def unchanged(targets, before):
    return all(np.array_equal(tensor.view(torch.uint8).numpy(), before[name]) for name, tensor in targets.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("density", [0.0, 0.02, 0.4, 1.0])
def test_an_anchor_and_deltas_give_the_published_bits(rig, dtype, density):
    targets = rig.targets(dtype)
    receiver = Receiver(memory_targets(targets), source=rig.store)
    assert receiver.apply(rig.publish(0, base=None)) == receiver.state_hash
    for version in range(1, 4):
        rig.change(density)
        manifest = rig.publish(version, base=version - 1)
        assert receiver.apply(manifest) == manifest.state_hash == joined([receiver.audit()])
        assert receiver.version == version
        assert rig.holds(targets)


def test_writes_are_in_place(synced):
    rig, targets, receiver = synced
    addresses = {name: tensor.data_ptr() for name, tensor in targets.items()}
    view = targets["embed.weight"][3]
    rig.change(1.0)
    receiver.apply(rig.publish(1, base=0))
    assert {name: tensor.data_ptr() for name, tensor in targets.items()} == addresses
    assert torch.equal(view.view(torch.int16), targets["embed.weight"][3].view(torch.int16))


def test_the_held_version_is_accepted_again_and_changes_nothing(synced):
    rig, targets, receiver = synced
    rig.change()
    manifest = rig.publish(1, base=0)
    first = receiver.apply(manifest)
    before = snapshot(targets)
    assert receiver.apply(manifest) == first
    assert unchanged(targets, before)


def test_a_wrong_base_is_refused_and_changes_nothing(synced):
    rig, targets, receiver = synced
    rig.change()
    one = rig.publish(1, base=0)
    rig.change()
    two = rig.publish(2, base=1)
    before = snapshot(targets)
    hidden = rig.root / "v000001" / "hidden"
    link = hidden.with_name("delta.json").rename(hidden)
    with pytest.raises(WrongBase, match="version 1 is not in the store"):
        receiver.apply(two)
    assert receiver.version == 0
    assert unchanged(targets, before)
    link.rename(hidden.with_name("delta.json"))
    receiver.apply(two)
    with pytest.raises(WrongBase, match="version 1 cannot follow version 2"):
        receiver.apply(one)
    assert receiver.version == 2
    assert rig.holds(targets)


def test_a_receiver_without_an_anchor_refuses_deltas(rig):
    rig.publish(0, base=None)
    rig.change()
    delta = rig.publish(1, base=0)
    rig.store.retain(1)
    receiver = Receiver(memory_targets(rig.targets()), source=rig.store)
    with pytest.raises(WrongBase, match="version 0 is not in the store"):
        receiver.apply(delta)
    assert receiver.apply(rig.anchor()) == delta.state_hash


class Offers:
    """A source that offers whatever chain it is told to."""

    def __init__(self, *chain: Manifest, store: StoreTransport) -> None:
        self._chain, self._store = chain, store

    def chain(self, manifest: Manifest, *, held: HeldVersion | None) -> tuple[Manifest, ...]:
        return self._chain

    def parts(self, manifest: Manifest) -> list[np.ndarray]:
        return self._store.parts(manifest)


def test_a_chain_that_does_not_lead_from_what_is_held_to_what_is_asked_is_refused(rig):
    versions = [rig.publish(0, base=None)]
    for version in range(1, 4):
        rig.change()
        versions.append(rig.publish(version, base=version - 1))
    for chain in ((), (versions[3],), versions[2:], versions[:3], [versions[0], versions[2], versions[3]]):
        targets = rig.targets()
        before = snapshot(targets)
        receiver = Receiver(memory_targets(targets), source=Offers(*chain, store=rig.store))
        with pytest.raises(WrongBase):
            receiver.apply(versions[3])
        assert unchanged(targets, before)


def test_a_delta_of_another_state_under_the_right_number_is_refused_before_writing(rig, make_rig):
    # the receiver's version 0 is not the version 0 the delta was made on: numbers agree, bits do not
    other = make_rig(seed=9)
    targets = rig.targets()
    receiver = Receiver(memory_targets(targets), source=other.store)
    receiver.apply(other.publish(0, base=None))
    rig.publish(0, base=None)
    rig.change()
    foreign = rig.publish(1, base=0)
    shutil.copytree(rig.root / "v000001", other.root / "v000001")
    before = snapshot(targets)
    with pytest.raises(WeightSyncError, match="would lead to state"):
        receiver.apply(foreign)
    assert unchanged(targets, before)
    assert (receiver.version, receiver.poisoned) == (0, "")


def test_memory_changed_from_outside_at_a_changed_place_is_refused(synced):
    rig, targets, receiver = synced
    targets["norm.weight"][0] = 3.0
    rig.change(1.0)
    with pytest.raises(WeightSyncError, match="would lead to state"):
        receiver.apply(rig.publish(1, base=0))


def test_an_audit_finds_memory_changed_from_outside_and_an_anchor_heals_it(synced):
    rig, targets, receiver = synced
    targets["embed.weight"][0, 0] += 1.0
    with pytest.raises(WeightSyncError, match="memory hashes to"):
        receiver.audit()
    assert receiver.version is None
    rig.change()
    delta = rig.publish(1, base=0)
    rig.store.retain(1)
    with pytest.raises(WrongBase, match="version 0 is not in the store"):
        receiver.apply(delta)
    receiver.apply(rig.anchor())
    assert (receiver.version, receiver.poisoned) == (1, "")
    assert rig.holds(targets)


def test_a_float32_runtime_that_holds_more_than_bf16_is_noticed(rig):
    targets = rig.targets(torch.float32)
    receiver = Receiver(memory_targets(targets), source=rig.store)
    receiver.apply(rig.publish(0, base=None))
    targets["up.weight"].view(torch.int32)[0, 0] += 1
    with pytest.raises(WeightSyncError, match="no BF16"):
        receiver.audit()


def test_memory_that_no_delta_touches_is_audited_now_and_then(synced):
    rig, targets, receiver = synced
    for version in range(1, 2 * AUDIT_EVERY_DELTAS):
        receiver.apply(rig.publish(version, base=version - 1))
        if version == AUDIT_EVERY_DELTAS:
            targets["embed.weight"][0, 0] += 1.0
    newest = rig.publish(2 * AUDIT_EVERY_DELTAS, base=2 * AUDIT_EVERY_DELTAS - 1)
    with pytest.raises(WeightSyncError, match="memory hashes to"):
        receiver.apply(newest)
    assert receiver.version is None
    receiver.apply(rig.anchor())
    assert rig.holds(targets)


def test_an_audit_needs_a_version(rig):
    with pytest.raises(WeightSyncError, match="no anchor was applied yet"):
        Receiver(memory_targets(rig.targets()), source=rig.store).audit()


@pytest.mark.parametrize("damage", ["truncate", "flip", "unlink"])
def test_a_damaged_part_is_refused_before_writing_and_heals_when_sent_again(synced, damage):
    rig, targets, receiver = synced
    rig.change()
    manifest = rig.publish(1, base=0)
    path = rig.root / manifest.parts[0].path
    whole = path.read_bytes()
    path.unlink()
    if damage != "unlink":
        path.write_bytes(whole[:-1] if damage == "truncate" else whole[:5] + bytes([whole[5] ^ 4]) + whole[6:])
    before = snapshot(targets)
    with pytest.raises(WeightSyncError, match="part-0-0"):
        receiver.apply(manifest)
    assert unchanged(targets, before)
    assert (receiver.version, receiver.poisoned) == (0, "")
    path.write_bytes(whole)
    receiver.apply(manifest)
    assert rig.holds(targets)


def entry_changes(**changes):
    return lambda m: dataclasses.replace(m, tensors=(dataclasses.replace(m.tensors[0], **changes), *m.tensors[1:]))


@pytest.mark.parametrize(("spoil", "message"), [
    (entry_changes(name="lm_head.weight"), "no tensor lm_head.weight"),
    (entry_changes(shape=(7, 40)), "was published with shape"),
    (entry_changes(dtype="F16"), "does not fit BF16"),
    (entry_changes(dtype="F32"), "does not fit BF16"),
    (entry_changes(start=1), "lie outside"),
    (entry_changes(start=-1), "lie outside"),
    (entry_changes(length=0), "lie outside"),
    (entry_changes(part=1), "names part 1 of 1"),
    (entry_changes(part=-1), "names part -1 of 1"),
    (entry_changes(offset=10_000), "should be at 0 of part 0"),
    (entry_changes(offset=-1), "should be at 0 of part 0"),
    (entry_changes(count=3), "should have"),
    (entry_changes(count=281), "cannot have 281"),
    (entry_changes(mode="lz4"), "unknown payload mode"),
    (entry_changes(mode="bitmap"), "should have"),
    (lambda m: dataclasses.replace(m, tensors=(*m.tensors, m.tensors[0])), "pieces overlap"),
    (lambda m: dataclasses.replace(m, tensors=m.tensors[:-1], base=None), "in an anchor, which must be dense"),
    (lambda m: dataclasses.replace(m, state_hash=m.state_hash ^ 1), "would lead to state"),
    (lambda m: dataclasses.replace(m, tensors=m.tensors[1:]), "should be at 0 of part 0"),
    (lambda m: dataclasses.replace(m, tensors=m.tensors[::-1]), "should be at 0 of part 0"),
    (lambda m: dataclasses.replace(m, tensors=m.tensors[:-1]), "bytes of its payloads"),
    (lambda m: dataclasses.replace(m, parts=(dataclasses.replace(m.parts[0], bytes=1 << 60, packed=Packed(1, "")),)), "of its payloads"),
])
def test_a_manifest_that_does_not_fit_is_refused_before_writing(synced, spoil, message):
    rig, targets, receiver = synced
    rig.change(0.05)
    manifest = rig.publish(1, base=0)
    assert manifest.tensors[0].mode == "blk16"
    assert manifest.tensors[0].count > 3
    before = snapshot(targets)
    with pytest.raises(WeightSyncError, match=message):
        receiver.apply(spoil(manifest))
    assert unchanged(targets, before)
    assert receiver.version == 0
    receiver.apply(manifest)
    assert rig.holds(targets)


@pytest.mark.parametrize("missing", [lambda entries: entries[1:], lambda entries: entries[:-1]])
def test_an_anchor_must_cover_everything(rig, missing):
    manifest = rig.publish(0, base=None)
    receiver = Receiver(memory_targets(rig.targets()), source=rig.store)
    with pytest.raises(WeightSyncError, match="leaves 1 tensors unset"):
        receiver.apply(dataclasses.replace(manifest, tensors=missing(manifest.tensors)))


def test_a_tensor_keeps_its_published_dtype_within_a_chain(rig):
    targets = rig.targets(torch.float32)
    receiver = Receiver(memory_targets(targets), source=rig.store)
    receiver.apply(rig.publish(0, base=None))
    delta = rig.publish(1, base=0)
    entry = dataclasses.replace(delta.tensors[0], dtype="F32")
    with pytest.raises(WeightSyncError, match="was published as BF16, the delta has F32"):
        receiver.apply(dataclasses.replace(delta, tensors=(entry, *delta.tensors[1:])))


def test_a_failure_while_writing_poisons_until_an_anchor(synced, monkeypatch):
    rig, targets, receiver = synced
    rig.change(0.5)
    one = rig.publish(1, base=0)
    write = MemoryTarget.write

    def failing(target, entry, changes):
        if target.name == "up.weight":
            raise MemoryError("torn")
        write(target, entry, changes)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryTarget, "write", failing)
        with pytest.raises(MemoryError):
            receiver.apply(one)
    assert (receiver.version, receiver.state_hash) == (None, None)
    assert receiver.poisoned == "writing version 1 did not finish"
    rig.change()
    two = rig.publish(2, base=1)
    rig.store.retain(1)
    with pytest.raises(WrongBase, match="no chain leads from nothing to version 2"):
        receiver.apply(two)
    assert receiver.apply(rig.anchor()) == two.state_hash
    assert rig.holds(targets)


def test_one_engine_of_two_fails_and_the_other_goes_on(synced):
    rig, targets, receiver = synced
    failed_targets = rig.targets()
    failed = Receiver(memory_targets(failed_targets), source=rig.store)
    failed.apply(rig.store.manifest(0))
    rig.change()
    one = rig.publish(1, base=0)
    path = rig.root / one.parts[0].path
    receiver.apply(one)
    path.rename(path.with_suffix(".away"))
    with pytest.raises(WeightSyncError, match="no file"):
        failed.apply(one)
    assert (receiver.version, failed.version) == (1, 0)
    path.with_suffix(".away").rename(path)
    rig.change()
    two = rig.publish(2, base=1)
    receiver.apply(two)
    failed.apply(two)
    assert rig.holds(targets)
    assert rig.holds(failed_targets)


def test_versions_never_run_backwards_within_a_run_epoch(synced):
    rig, targets, receiver = synced
    anchor = rig.store.manifest(0)
    rig.change()
    receiver.apply(rig.publish(1, base=0))
    with pytest.raises(WrongBase, match="versions only grow"):
        receiver.apply(anchor)
    assert rig.holds(targets)


def test_a_new_run_epoch_begins_with_an_anchor_and_ends_the_old_one(synced):
    rig, targets, receiver = synced
    rig.change()
    old_epoch = rig.publish(1, base=0)
    with pytest.raises(WrongBase, match="version 0 is not in the store, or not whole, or not of run epoch 1"):
        receiver.apply(dataclasses.replace(old_epoch, run_epoch=1))
    receiver.apply(rig.anchor(run_epoch=1))
    assert receiver.version == 1
    with pytest.raises(WrongBase, match="run epoch 0 is over"):
        receiver.apply(old_epoch)
    assert rig.holds(targets)


def test_catch_up_applies_every_missed_version_in_order(synced):
    rig, targets, receiver = synced
    for version in (2, 4, 6):  # published every two steps
        rig.change(0.3)
        newest = rig.publish(version, base=version - 2)
    assert receiver.apply(newest) == newest.state_hash
    assert receiver.version == 6
    assert rig.holds(targets)
    assert receiver.apply(newest) == newest.state_hash


def test_catch_up_starts_at_an_anchor_on_the_way(synced):
    rig, targets, receiver = synced
    for version, base in ((1, 0), (2, None), (3, 2)):
        rig.change(0.3)
        newest = rig.publish(version, base=base)
    rig.store.retain(1)  # version 1 is gone, and not needed
    receiver.apply(newest)
    assert rig.holds(targets)


def test_catch_up_without_a_link_is_refused_and_changes_nothing(synced):
    rig, targets, receiver = synced
    for version in (1, 2, 3):
        rig.change(0.3)
        newest = rig.publish(version, base=version - 1)
    rig.store.retain(3)
    before = snapshot(targets)
    with pytest.raises(WrongBase, match="to version 3: version 2 is not in the store"):
        receiver.apply(newest)
    assert unchanged(targets, before)
    receiver.apply(rig.anchor())
    assert rig.holds(targets)


def test_catch_up_heals_a_late_engine_from_anchor_and_deltas(synced):
    rig, _, _ = synced
    rig.change(0.3)
    newest = rig.publish(1, base=0)
    targets = rig.targets()
    Receiver(memory_targets(targets), source=rig.store).apply(newest)
    assert rig.holds(targets)


def test_a_base_that_is_no_older_than_its_version_is_refused(synced):
    rig, _, receiver = synced
    manifest = rig.publish(1, base=0)
    with pytest.raises(WrongBase, match="a base is older than its version"):
        receiver.apply(dataclasses.replace(manifest, base=5))


def test_targets_that_share_memory_or_are_no_plain_memory_are_refused(rig):
    weight = torch.zeros(4, 4, dtype=torch.bfloat16)
    with pytest.raises(WeightSyncError, match="share memory"):
        Receiver(memory_targets({"embed.weight": weight, "lm_head.weight": weight}), source=rig.store)
    with pytest.raises(WeightSyncError, match="share memory"):
        Receiver(memory_targets({"a": weight, "b": weight[2:]}), source=rig.store)
    with pytest.raises(WeightSyncError, match="contiguous CPU memory"):
        Receiver(memory_targets({"a": weight.t()}), source=rig.store)
    with pytest.raises(WeightSyncError, match="complex64"):
        Receiver(memory_targets({"a": torch.zeros(2, dtype=torch.complex64)}), source=rig.store)
