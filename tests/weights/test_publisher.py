import dataclasses

import numpy as np
import pytest

from asyncrl.errors import WeightSyncError, WrongBase
from asyncrl.weights import piece_bits
from asyncrl.weights.manifest import Manifest, Piece, RankPublication, merge
from asyncrl.weights.piece_bits import ArrayBits
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.receiver import Receiver
from asyncrl.weights.state_hash import MODULUS, hash_bits, tensor_seed
from asyncrl.weights.torch_pieces import memory_targets


def state_hash(rig):
    return sum(hash_bits(tensor_seed(name, "BF16"), bits, start=0) for name, bits in rig.state.items()) % MODULUS


def files(rig):
    return {path.name: path.read_bytes() for path in rig.root.rglob("part-*")}


def test_an_anchor_holds_every_element_dense(rig):
    manifest = rig.publish(0, base=None)
    assert manifest.base is None
    assert {entry.mode for entry in manifest.tensors} == {"dense"}
    assert (manifest.density, manifest.payload_bytes) == (1.0, 2 * (280 + 1 + 15))
    assert manifest.state_hash == state_hash(rig)


def test_a_delta_holds_what_changed_and_nothing_else(rig):
    rig.publish(0, base=None)
    rig.state["embed.weight"] = rig.state["embed.weight"].copy()
    rig.state["embed.weight"][[3, 279]] ^= 1
    manifest = rig.publish(1, base=0)
    assert [(entry.name, entry.mode, entry.count, entry.bytes) for entry in manifest.tensors] == [
        ("embed.weight", "blk16", 2, 4 + 2 * 4), ("norm.weight", "blk16", 0, 0), ("up.weight", "blk16", 0, 0)]
    assert manifest.density == pytest.approx(2 / 296)
    assert manifest.state_hash == state_hash(rig)


def test_count_is_what_changed_also_where_the_piece_is_sent_whole(rig):
    rig.publish(0, base=None)
    rig.state = {name: bits ^ np.uint16(1) for name, bits in rig.state.items()}
    rig.state["embed.weight"][0] ^= 1
    manifest = rig.publish(1, base=0)
    assert [(entry.mode, entry.count) for entry in manifest.tensors] == [("dense", 279), ("dense", 1), ("dense", 15)]


def test_the_same_states_give_the_same_bytes(make_rig):
    runs = []
    for _ in range(2):
        rig = make_rig(seed=4)
        rig.publish(0, base=None)
        rig.change()
        runs.append((rig.publish(1, base=0).to_json(), files(rig)))
    assert runs[0] == runs[1]


def test_the_snapshot_moves_only_with_the_commit(rig):
    # a publication whose manifest never became durable (W07, W15): the next delta starts from the same base and loses nothing
    first = rig.publish(0, base=None)
    targets = rig.targets()
    receiver = Receiver(memory_targets(targets), source=rig.store)
    receiver.apply(first)
    rig.change(0.5)
    rig.publisher.publish(rig.bits(), version=1, base=0)
    rig.publisher.abandon()
    assert (rig.publisher.version, rig.store.latest()) == (0, 0)
    rig.change(0.5)
    assert receiver.apply(rig.publish(2, base=0)) == state_hash(rig)
    assert rig.holds(targets)


def test_a_failed_write_leaves_nothing_pending_and_the_next_delta_whole(rig, monkeypatch):
    targets = rig.targets()
    receiver = Receiver(memory_targets(targets), source=rig.store)
    receiver.apply(rig.publish(0, base=None))
    rig.change()

    def full(*_, **__):
        raise WeightSyncError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(rig.store, "put_part", full)
        with pytest.raises(WeightSyncError, match="No space"):
            rig.publisher.publish(rig.bits(), version=1, base=0)
    assert rig.publisher.version == 0
    receiver.apply(rig.publish(1, base=0))
    assert rig.holds(targets)


def test_versions_grow_and_bases_are_the_snapshot(rig):
    with pytest.raises(WrongBase, match="snapshot holds None"):
        rig.publisher.publish(rig.bits(), version=1, base=0)
    rig.publish(5, base=None)
    with pytest.raises(WrongBase, match="snapshot holds 5"):
        rig.publisher.publish(rig.bits(), version=6, base=4)
    with pytest.raises(WeightSyncError, match="versions only grow"):
        rig.publisher.publish(rig.bits(), version=5, base=None)
    rig.publisher.publish(rig.bits(), version=6, base=5)
    with pytest.raises(WeightSyncError, match="neither committed nor abandoned"):
        rig.publisher.publish(rig.bits(), version=7, base=5)
    with pytest.raises(WeightSyncError, match="version 7 is not pending, 6 is"):
        rig.publisher.committed(7)


@pytest.mark.parametrize("wrong", ["order", "dtype", "shape", "missing", "extra"])
def test_pieces_other_than_announced_are_refused(rig, wrong):
    bits = [(piece, rig.state[piece.name]) for piece in rig.pieces]
    given = {"order": bits[::-1], "missing": bits[:-1], "extra": [*bits, bits[0]],
             "dtype": [(piece, values.astype(np.uint32)) for piece, values in bits],
             "shape": [(piece, values[:-1]) for piece, values in bits]}[wrong]
    with pytest.raises(WeightSyncError, match=r"should be|expected"):
        rig.publisher.publish(ArrayBits(given), version=0, base=None)
    assert rig.publish(0, base=None).version == 0


def test_a_restarted_publisher_goes_on_from_the_adopted_version(rig):
    targets = rig.targets()
    receiver = Receiver(memory_targets(targets), source=rig.store)
    receiver.apply(rig.publish(3, base=None))
    rig.publisher = Publisher(rig.pieces, rank=0, sink=rig.store)
    assert rig.publisher.adopt(rig.bits(), version=3) == receiver.state_hash
    rig.change()
    assert receiver.apply(rig.publish(4, base=3)) == state_hash(rig)
    assert rig.holds(targets)


def test_an_anchor_of_the_committed_version_can_be_written_at_any_time(rig):
    with pytest.raises(WeightSyncError, match="no committed version"):
        rig.publisher.anchor()
    rig.publish(0, base=None)
    rig.change()
    delta = rig.publish(1, base=0)
    published = dict(rig.state)
    rig.change()
    anchor = rig.anchor()
    rig.state = published
    targets = rig.targets()
    assert Receiver(memory_targets(targets), source=rig.store).apply(anchor) == delta.state_hash
    assert rig.holds(targets)


def test_a_snapshot_changed_in_memory_is_noticed(rig):
    rig.publish(0, base=None)
    rig.publisher._snapshot._memory[5] ^= 1
    with pytest.raises(WeightSyncError, match="changed in memory"):
        rig.publisher.anchor()


def test_parts_end_before_they_grow_too_large(make_rig):
    rig = make_rig(part_bytes=100)
    manifest = rig.publish(0, base=None)
    assert [part.bytes for part in manifest.parts] == [560, 32]  # a payload is never split; the next ones share a part
    targets = rig.targets()
    Receiver(memory_targets(targets), source=rig.store).apply(manifest)
    assert rig.holds(targets)


def test_a_long_piece_becomes_several_entries(make_rig, monkeypatch):
    monkeypatch.setattr(piece_bits, "ENTRY_ELEMENTS", 100)
    rig = make_rig()
    manifest = rig.publish(0, base=None)
    assert [(entry.start, entry.length) for entry in manifest.tensors if entry.name == "embed.weight"] == [(0, 100), (100, 100), (200, 80)]
    targets = rig.targets()
    receiver = Receiver(memory_targets(targets), source=rig.store)
    receiver.apply(manifest)
    rig.change(0.3)
    receiver.apply(rig.publish(1, base=0))
    assert rig.holds(targets)


def test_uneven_shards_publish_the_state_of_one_rank(rig):
    whole = rig.publish(0, base=None)
    cuts = {"embed.weight": (0, 14, 280), "norm.weight": (0, 1, 1), "up.weight": (0, 5, 15)}
    publications = []
    for rank in (0, 1):
        pieces, bits = [], []
        for piece in rig.pieces:
            low, high = cuts[piece.name][rank], cuts[piece.name][rank + 1]
            pieces.append(dataclasses.replace(piece, start=low, length=high - low))
            bits.append((pieces[-1], rig.state[piece.name][low:high]))
        publications.append(Publisher(pieces, rank=rank, sink=rig.store).publish(ArrayBits(bits), version=0, base=None))
    manifest = merge(publications, run_epoch=0, version=0, base=None)
    assert manifest.state_hash == whole.state_hash
    targets = rig.targets()
    Receiver(memory_targets(targets), source=rig.store).apply(manifest)
    assert rig.holds(targets)


def test_publication_and_manifest_survive_the_wire(rig):
    publication = rig.publisher.publish(rig.bits(), version=0, base=None)
    assert RankPublication.from_wire(publication.to_wire()) == publication
    manifest = merge([publication], run_epoch=0, version=0, base=None)
    assert Manifest.from_json(manifest.to_json()) == manifest


def test_a_rank_without_elements_publishes_no_part(rig):
    empty = [Piece(name="embed.weight", dtype="BF16", shape=(40, 7), start=280, length=0)]
    publication = Publisher(empty, rank=1, sink=rig.store).publish(ArrayBits([(empty[0], np.empty(0, np.uint16))]), version=0, base=None)
    assert (publication.parts, publication.entries, publication.hash_share) == ((), (), 0)
