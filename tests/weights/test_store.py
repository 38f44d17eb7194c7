import dataclasses
import json

import pytest

from asyncrl.errors import WeightSyncError
from asyncrl.weights.manifest import Manifest, Part, RankPublication, merge
from asyncrl.weights.store import StoreTransport


@pytest.fixture
def root(tmp_path):
    return tmp_path / "weights"


@pytest.fixture
def store(root):
    return StoreTransport(root)


def manifest_of(store, version, *, state_hash=5, run_epoch=0, content=b"abc"):
    part = store.put_part(version, rank=0, bucket=0, chunks=[content])
    return Manifest(run_epoch=run_epoch, version=version, base=None, parts=(part,), tensors=(), state_hash=state_hash)


def test_a_part_is_read_back_as_written(store):
    part = store.put_part(3, rank=1, bucket=2, chunks=[b"ab", b"", b"c"])
    assert part.bytes == 3
    assert part.path == f"v000003/part-1-2-{part.xxh3[:16]}.bin"
    assert store.open_part(part).tobytes() == b"abc"


def test_an_empty_part_is_read_back(store):
    assert store.open_part(store.put_part(0, rank=0, bucket=0, chunks=[])).tobytes() == b""


def test_a_version_exists_once_its_manifest_does(store):
    manifest = manifest_of(store, 4)
    assert (store.latest(), store.versions()) == (None, ())
    store.commit(manifest)
    assert (store.latest(), store.versions(), store.manifest(4)) == (4, (4,), manifest)


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(path.read_bytes()[:-1]), lambda path: path.write_bytes(b"abd"),
                                    lambda path: path.unlink(), lambda path: path.write_bytes(b"")])
def test_a_damaged_part_is_refused(store, root, damage):
    part = store.put_part(0, rank=0, bucket=0, chunks=[b"abc"])
    damage(next(root.rglob("part-*")))
    with pytest.raises(WeightSyncError, match="part-0-0"):
        store.open_part(part)


def test_a_flipped_bit_anywhere_in_a_manifest_is_refused(store, root):
    store.commit(manifest_of(store, 7))
    path = next(root.rglob("anchor.json"))
    whole = path.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << (position % 8)
        path.write_bytes(damaged)
        if _json_or_none(damaged) != json.loads(whole):  # a space may become another kind of space
            with pytest.raises(WeightSyncError, match="version 7"):
                store.manifest(7)


def _json_or_none(text):
    try:
        return json.loads(text)
    except ValueError:
        return None


def test_a_manifest_in_the_wrong_folder_is_refused(store, root):
    store.commit(manifest_of(store, 7))
    (root / "v000007").rename(root / "v000008")
    with pytest.raises(WeightSyncError, match="says it is version 7"):
        store.manifest(8)


def test_a_missing_version_names_what_there_is(store):
    store.commit(manifest_of(store, 7))
    with pytest.raises(WeightSyncError, match=r"version 8 is not in the store; it has \[7\]"):
        store.manifest(8)


def test_a_manifest_without_its_part_is_not_committed(store, root):
    manifest = manifest_of(store, 1)
    next(root.rglob("part-*")).unlink()
    with pytest.raises(WeightSyncError, match="lacks its part"):
        store.commit(manifest)
    assert store.latest() is None


def test_a_version_never_changes_its_state(store):
    manifest = manifest_of(store, 1)
    store.commit(manifest)
    store.commit(manifest)
    with pytest.raises(WeightSyncError, match="already published with another state"):
        store.commit(dataclasses.replace(manifest, state_hash=6))
    store.commit(dataclasses.replace(manifest, state_hash=6, run_epoch=1))
    assert store.manifest(1).state_hash == 6


def test_a_damaged_manifest_can_be_replaced(store, root):
    manifest = manifest_of(store, 1)
    store.commit(manifest)
    next(root.rglob("anchor.json")).write_text("{")
    store.commit(manifest)
    assert store.manifest(1) == manifest


def test_writing_a_version_again_leaves_the_committed_one_whole(store):
    manifest = manifest_of(store, 1, content=b"abc")
    store.commit(manifest)
    store.put_part(1, rank=0, bucket=0, chunks=[b"xyz"])
    assert store.open_part(store.manifest(1).parts[0]).tobytes() == b"abc"


def test_retain_deletes_older_versions_but_never_the_newest(store, root):
    for version in (1, 2, 4):
        store.commit(manifest_of(store, version))
    held = store.open_part(store.manifest(1).parts[0])
    store.retain(2)
    assert store.versions() == (4,)
    assert held.tobytes() == b"abc"
    assert sorted(path.name for path in root.iterdir()) == ["v000004"]


def test_retain_keeps_a_version_that_is_being_written(store, root):
    store.commit(manifest_of(store, 1))
    store.put_part(2, rank=0, bucket=0, chunks=[b"abc"])
    store.retain(5)
    assert (root / "v000002").is_dir()


def test_a_full_disk_is_an_error_that_leaves_nothing(store, root):
    def chunks():
        yield b"abc"
        raise OSError(28, "No space left on device")

    with pytest.raises(WeightSyncError, match="No space left"):
        store.put_part(0, rank=0, bucket=0, chunks=chunks())
    assert [path for path in root.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("path", ["../outside", "/etc/hostname", "v000000/../../outside"])
def test_a_part_outside_the_store_is_refused(store, tmp_path, path):
    (tmp_path / "outside").write_bytes(b"abc")
    with pytest.raises(WeightSyncError, match="outside the store"):
        store.open_part(Part(path=path, bytes=3, xxh3=""))


def test_merge_counts_parts_over_ranks_and_adds_hash_shares():
    def publication(rank, share, base=1):
        part = Part(path=f"p{rank}", bytes=0, xxh3="")
        return RankPublication(version=2, base=base, parts=(part,), entries=(), hash_share=share)

    manifest = merge([publication(0, 2**64 - 1), publication(1, 3)], run_epoch=9, version=2, base=1)
    assert (manifest.run_epoch, manifest.version, manifest.base, manifest.state_hash) == (9, 2, 1, 2)
    assert [part.path for part in manifest.parts] == ["p0", "p1"]
    with pytest.raises(WeightSyncError, match="rank 1 published version 2 on base None"):
        merge([publication(0, 0), publication(1, 0, base=None)], run_epoch=0, version=2, base=1)
