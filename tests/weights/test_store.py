import dataclasses
import json

import fsspec
import numpy as np
import pytest

from asyncrl.errors import ConfigError, WeightSyncError, WrongBase
from asyncrl.weights.config import StoreConfig
from asyncrl.weights.ends import TransportSpec, log_of, source_of
from asyncrl.weights.manifest import Manifest, Part, RankPublication, merge
from asyncrl.weights.receiver import Receiver
from asyncrl.weights.store import open_store
from asyncrl.weights.torch_pieces import memory_targets
from tests.weights.places import KINDS, Place, committed, written


@pytest.fixture(params=KINDS)
def place(request, tmp_path):
    """Whatever a store lies on, and how to get at its bytes behind its back."""
    return Place(request.param, tmp_path / "weights")


def test_a_part_is_read_back_as_written(place):
    part = place.store.put_part(3, rank=1, bucket=2, chunks=[b"ab", b"", np.frombuffer(b"cd", np.uint8), memoryview(b"e")])
    assert (part.bytes, part.path) == (5, f"v000003/part-1-2-{part.xxh3[:16]}.bin")
    assert place.store.open_part(part).tobytes() == b"abcde"
    assert part.file_bytes == len(place.read(part.path))
    assert not place.store.open_part(part).flags.writeable


def test_an_empty_part_is_read_back(place):
    assert place.store.open_part(place.store.put_part(0, rank=0, bucket=0, chunks=[])).tobytes() == b""


def test_a_version_exists_once_its_manifest_does(place):
    manifest = written(place.store, 4)
    assert (place.store.latest(), place.store.versions()) == (None, ())
    place.store.commit(manifest)
    assert (place.store.latest(), place.store.versions(), place.store.manifest(4)) == (4, (4,), manifest)
    assert Manifest.from_json(manifest.to_json()) == manifest


DAMAGES = {"shorter": lambda content: content[:-1], "flipped": lambda content: content[:3] + bytes([content[3] ^ 4]) + content[4:],
           "empty": lambda content: b"", "longer": lambda content: content + b"\0", "doubled": lambda content: content * 2}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_part_is_refused_by_name_and_heals(place, damage):
    part = place.store.put_part(0, rank=0, bucket=0, chunks=[bytes(range(200)) * 9])
    whole = place.read(part.path)
    place.write(part.path, DAMAGES[damage](whole))
    with pytest.raises(WeightSyncError, match="part-0-0"):
        place.store.open_part(part)
    place.write(part.path, whole)
    assert place.store.open_part(part).tobytes() == bytes(range(200)) * 9


def test_a_part_that_is_missing_or_renamed_is_refused_by_name(place):
    one, other = (place.store.put_part(0, rank=rank, bucket=0, chunks=[bytes([rank]) * 500]) for rank in range(2))
    place.move(one.path, "v000000/away")
    with pytest.raises(WeightSyncError, match=r"part-0-0.* has no file"):
        place.store.open_part(one)
    place.move(other.path, one.path)
    with pytest.raises(WeightSyncError, match="part-0-0"):
        place.store.open_part(one)


def test_a_flipped_bit_anywhere_in_a_manifest_is_refused(place):
    manifest = committed(place.store, 7)
    whole = place.read("v000007/anchor.json")
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << (position % 8)
        place.write("v000007/anchor.json", bytes(damaged))
        if _json_or_none(damaged) != json.loads(whole):  # a space may become another kind of space
            with pytest.raises(WeightSyncError, match="version 7"):
                place.store.manifest(7)
    place.write("v000007/anchor.json", whole)
    assert place.store.manifest(7) == manifest


def _json_or_none(text):
    try:
        return json.loads(text)
    except ValueError:
        return None


def test_no_beginning_of_a_manifest_is_valid(place):
    committed(place.store, 7)
    whole = place.read("v000007/anchor.json")
    for length in range(len(whole)):
        place.write("v000007/anchor.json", whole[:length])
        with pytest.raises(WeightSyncError, match="version 7 is damaged"):
            place.store.manifest(7)


@pytest.mark.parametrize("other", ["v000008/anchor.json", "v000007/delta.json"])
def test_a_manifest_in_the_wrong_place_is_refused(place, other):
    committed(place.store, 7)
    place.move("v000007/anchor.json", other)
    with pytest.raises(WeightSyncError, match="says it is version 7 on base None"):
        place.store.manifest(int(other[1:7]))


def test_a_missing_version_names_what_there_is(place):
    committed(place.store, 7)
    with pytest.raises(WeightSyncError, match=r"version 8 is not in the store; it has \[7\]"):
        place.store.manifest(8)


@pytest.mark.parametrize("damage", ["missing", "shorter"])
def test_a_manifest_without_its_part_is_not_committed(place, damage):
    manifest = written(place.store, 1)
    (part,) = manifest.parts
    place.remove(part.path) if damage == "missing" else place.write(part.path, place.read(part.path)[:-1])
    with pytest.raises(WeightSyncError, match="lacks its part"):
        place.store.commit(manifest)
    assert place.store.latest() is None


def test_a_version_never_changes_its_state_within_a_run_epoch(place):
    manifest = committed(place.store, 1, state_hash=5)
    place.store.commit(manifest)
    for base in (None, 0):
        with pytest.raises(WeightSyncError, match="already published with another state"):
            place.store.commit(dataclasses.replace(manifest, state_hash=6, base=base))
    place.store.commit(dataclasses.replace(manifest, state_hash=6, run_epoch=1))
    assert place.store.manifest(1).state_hash == 6


def test_of_two_publishers_of_a_rank_the_older_run_epoch_changes_nothing(place):
    old = written(place.store, 3, content=b"old" * 99)
    new = written(place.store, 3, content=b"new" * 99, run_epoch=1)
    place.store.commit(new)
    with pytest.raises(WeightSyncError, match="cannot be of run epoch 0: 1 has begun"):
        place.store.commit(old)
    assert place.store.manifest(3) == new
    assert place.store.parts(new)[0].tobytes() == b"new" * 99
    assert place.store.parts(old)[0].tobytes() == b"old" * 99
    assert place.store.newest_epoch() == 1


def test_a_damaged_manifest_can_be_replaced(place):
    manifest = committed(place.store, 1)
    place.write("v000001/anchor.json", b"{")
    place.store.commit(manifest)
    assert place.store.manifest(1) == manifest


def test_writing_a_version_again_leaves_the_committed_one_whole(place):
    manifest = committed(place.store, 1, content=b"abc")
    place.store.put_part(1, rank=0, bucket=0, chunks=[b"xyz"])
    assert place.store.parts(manifest)[0].tobytes() == b"abc"


@pytest.mark.parametrize("path", ["../outside", "/etc/hostname", "v000000/../../outside", "memory://outside", "..\\outside", "", ".",
                                  "./v000000", "v000000//x", "v000000/\0", "v000000/\ud800", "v000000/*", "~/outside", "v000000/x\n",
                                  ".hidden"])
def test_a_part_outside_the_store_is_refused(place, tmp_path, path):
    (tmp_path / "outside").write_bytes(b"abc")
    with pytest.raises(WeightSyncError, match="outside the store"):
        place.store.open_part(Part(path=path, bytes=3, xxh3=""))


def test_a_link_that_leads_out_of_the_store_is_refused(tmp_path):
    (tmp_path / "outside").write_bytes(b"abc")
    place = Place("shared", tmp_path / "weights")
    (tmp_path / "weights" / "v000000").symlink_to(tmp_path)
    with pytest.raises(WeightSyncError, match="outside the store"):
        place.store.open_part(Part(path="v000000/outside", bytes=3, xxh3=""))


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_follows_through_any_store_bit_for_bit(make_rig, tmp_path, kind):
    place = Place(kind, tmp_path / "weights")
    rig = make_rig(store=place.store, part_bytes=100)
    targets, late_targets = rig.targets(), rig.targets()
    receiver, late = Receiver(memory_targets(targets), source=place.store), Receiver(memory_targets(late_targets), source=place.store)
    for version in range(5):
        rig.change(0.3)
        newest = rig.publish(version, base=version - 1 if version else None)
        receiver.apply(newest)
        assert rig.holds(targets)
        place.store.retain(version)
    with pytest.raises(WrongBase):
        late.apply(newest)
    rig.anchor()
    late.apply(newest)  # the delta is asked for, the anchor beside it serves
    assert rig.holds(late_targets)


def test_a_run_finds_its_versions_below_the_root(tmp_path):
    config = StoreConfig(root=str(tmp_path / "root"), compression="zstd", keep_bytes=None)
    spec = TransportSpec(tmp_path / "shared", run="mine", config=config)
    assert TransportSpec.from_wire(json.loads(json.dumps(spec.to_wire()))) == spec
    manifest = committed(log_of(spec), 0)
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("anchor.json")] == ["root/mine/v000000/anchor.json"]
    assert source_of(spec).parts(manifest)[0].tobytes() == b"abcd" * 300
    as_url = dataclasses.replace(spec, config=StoreConfig(root=f"file://{tmp_path}/root"))
    assert source_of(as_url).parts(manifest)[0].tobytes() == b"abcd" * 300


@pytest.mark.parametrize(("root", "says"), [("/proc/asyncrl", "Make it writable"), ("s3://bucket/weights", "s3fs"),
                                            ("nosuch://place", "nosuch"), ("refusing://place", "NoCredentials: who are you")])
def test_a_root_that_cannot_be_written_is_refused_with_its_field_and_a_remedy(tmp_path, root, says):
    class NoCredentials(Exception):
        pass

    class Refusing(fsspec.AbstractFileSystem):
        protocol = "refusing"

        def pipe_file(self, path, value, **settings):
            raise NoCredentials("who are you")

    fsspec.register_implementation("refusing", Refusing, clobber=True)
    with pytest.raises(ConfigError, match=r"weights\.transport\.root") as caught:
        log_of(TransportSpec(tmp_path, config=StoreConfig(root=root)))
    assert says in str(caught.value)


def test_a_place_too_full_to_pull_into_is_an_error(tmp_path, monkeypatch):
    place = Place("remote", tmp_path / "weights")
    part = place.store.put_part(0, rank=0, bucket=0, chunks=[b"abc"])

    def full(descriptor, start, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(WeightSyncError, match="No space left"):
        place.store.open_part(part)


def test_a_url_without_a_path_stays_one(tmp_path):
    store = open_store(StoreConfig(root="memory://"), folder=tmp_path, run=f"run-{tmp_path.name}")
    manifest = committed(store, 0)
    assert store.parts(manifest)[0].tobytes() == b"abcd" * 300
    assert fsspec.filesystem("memory").exists(f"/run-{tmp_path.name}/v000000/anchor.json")


def test_merge_counts_parts_over_ranks_and_adds_hash_shares():
    def publication(rank, share, base=1):
        part = Part(path=f"p{rank}", bytes=0, xxh3="")
        return RankPublication(version=2, base=base, parts=(part,), entries=(), hash_share=share)

    manifest = merge([publication(0, 2**64 - 1), publication(1, 3)], run_epoch=9, version=2, base=1)
    assert (manifest.run_epoch, manifest.version, manifest.base, manifest.state_hash) == (9, 2, 1, 2)
    assert [part.path for part in manifest.parts] == ["p0", "p1"]
    with pytest.raises(WeightSyncError, match="rank 1 published version 2 on base None"):
        merge([publication(0, 0), publication(1, 0, base=None)], run_epoch=0, version=2, base=1)
