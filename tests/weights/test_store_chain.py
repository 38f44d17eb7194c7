"""Which files lead to a version, and which may go."""

import shutil
import threading

import numpy as np
import pytest

from asyncrl.errors import WeightSyncError, WrongBase
from asyncrl.weights.files import LocalFiles
from asyncrl.weights.receiver import Receiver
from asyncrl.weights.torch_pieces import memory_targets
from asyncrl.weights.transport import HeldVersion
from tests.weights.places import KINDS, Place, committed


@pytest.fixture(params=KINDS)
def place(request, tmp_path):
    """Whatever a store lies on, and how to get at its bytes behind its back."""
    return Place(request.param, tmp_path / "weights")


def versions_of(chain):
    return [(link.version, link.base) for link in chain]


def test_an_anchor_stays_beside_its_delta(place):
    committed(place.store, 0)
    delta = committed(place.store, 1, base=0, content=b"few")
    anchor = committed(place.store, 1, content=b"many" * 99)
    assert (place.store.manifest(1), place.store.versions()) == (delta, (0, 1))
    assert place.store.chain(delta, held=HeldVersion(0, 0)) == [delta]
    assert place.store.chain(delta, held=None) == [anchor]


def test_a_chain_moves_the_fewest_bytes(place):
    noise = np.random.default_rng(0)
    committed(place.store, 0, content=noise.bytes(1000))
    for version, size in ((1, 300), (2, 300), (3, 900), (4, 100)):
        newest = committed(place.store, version, base=version - 1, content=noise.bytes(size))
    assert versions_of(place.store.chain(newest, held=HeldVersion(0, 1))) == [(2, 1), (3, 2), (4, 3)]
    committed(place.store, 3, content=noise.bytes(1000))
    assert versions_of(place.store.chain(newest, held=HeldVersion(0, 1))) == [(3, None), (4, 3)]
    assert versions_of(place.store.chain(newest, held=HeldVersion(0, 2))) == [(3, 2), (4, 3)]
    assert versions_of(place.store.chain(newest, held=None)) == [(3, None), (4, 3)]
    assert versions_of(place.store.chain(newest, held=HeldVersion(1, 3))) == [(3, None), (4, 3)]  # of another run epoch


@pytest.mark.parametrize("damage", ["no manifest", "half a manifest", "no part", "flipped part"])
def test_a_chain_goes_round_a_damaged_link_where_an_anchor_allows_it(place, damage):
    committed(place.store, 0)
    link = committed(place.store, 1, base=0, content=b"1" * 9)
    newest = committed(place.store, 2, base=1, content=b"2" * 9)
    path = link.parts[0].path if "part" in damage else "v000001/delta.json"
    whole = place.read(path)
    if damage.startswith("no "):
        place.remove(path)
    else:
        place.write(path, whole[:-1] if "half" in damage else whole[:-1] + bytes([whole[-1] ^ 1]))
    held = HeldVersion(0, 0)
    if "manifest" in damage:
        with pytest.raises(WrongBase, match="version 1 is not in the store, or not whole"):
            place.store.chain(newest, held=held)
    else:
        chain = place.store.chain(newest, held=held)  # nothing better is known: opening it names the part
        with pytest.raises(WeightSyncError, match="part-0-0"):
            [place.store.parts(each) for each in chain]
    anchor = committed(place.store, 2, content=np.random.default_rng(0).bytes(999))
    assert place.store.chain(newest, held=held) == [anchor]
    place.write(path, whole)
    if "part" in damage:
        place.store.parts(link)
    assert place.store.chain(newest, held=held) == [link, newest]


def test_every_link_is_looked_at_once_however_many_ways_there_are(place, monkeypatch):
    committed(place.store, 0)
    for version in range(1, 13):
        newest = committed(place.store, version, base=version - 1)
        committed(place.store, version)
    looked = []
    sizes = type(place.files).sizes
    monkeypatch.setattr(type(place.files), "sizes", lambda files, folder="": (looked.append(folder), sizes(files, folder))[1])
    assert versions_of(place.store.chain(newest, held=None)) == [(12, None)]
    assert len(looked) <= 13 + 12


def test_an_anchor_that_is_asked_for_is_the_only_way(place):
    committed(place.store, 0)
    committed(place.store, 1, base=0)
    anchor = committed(place.store, 1, content=b"many" * 999)
    assert place.store.chain(anchor, held=HeldVersion(0, 0)) == [anchor]


def test_retention_leaves_what_engines_need_and_what_is_being_written(place):
    manifests = [committed(place.store, version, base=version - 1 if version else None, content=bytes([version]) * 99)
                 for version in range(6)]
    early = place.store.open_part(manifests[1].parts[0])
    place.store.put_part(3, rank=7, bucket=0, chunks=[b"left by a rank that was killed"])
    place.store.put_part(6, rank=0, bucket=0, chunks=[b"on its way"])
    place.store.retain(3)
    assert place.store.versions() == (4, 5)
    assert {path[:7] for path in place.names()} == {"v000004", "v000005", "v000006"}
    assert early.tobytes() == bytes([1]) * 99
    assert [place.store.parts(link)[0][0] for link in place.store.chain(manifests[5], held=HeldVersion(0, 3))] == [4, 5]
    place.store.retain(5)
    assert {path[:7] for path in place.names()} == {"v000005", "v000006"}


def test_history_stays_within_keep_bytes(tmp_path):
    place = Place("shared", tmp_path / "weights", keep_bytes=12_000)
    for version in range(6):
        newest = committed(place.store, version, base=version - 1 if version else None, content=bytes([version]) * 3000)
        place.store.retain(version)
    assert place.store.versions() == (3, 4, 5)  # with their manifests four would have more
    assert sum(place.files.sizes().values()) <= 12_000
    committed(place.store, 5, content=b"5" * 3000)
    place.store.retain(5)
    assert versions_of(place.store.chain(newest, held=None)) == [(5, None)]
    assert place.store.versions() == (5,)


def test_a_new_run_epoch_ends_the_files_of_the_old_one(place):
    for version in range(4):
        committed(place.store, version, base=version - 1 if version else None)
    committed(place.store, 2, content=b"another", run_epoch=1)
    place.store.retain(2)
    assert (place.store.versions(), place.store.newest_epoch()) == ((2,), 1)


def test_a_damaged_manifest_stays_until_nobody_waits_for_it(place):
    for version in range(4):
        committed(place.store, version, base=version - 1 if version else None)
    place.write("v000002/delta.json", b"{")
    place.store.retain(1)
    assert "v000002/delta.json" in place.names()
    place.store.retain(2)
    assert {path[:7] for path in place.names()} == {"v000003"}


def test_a_reader_loses_nothing_while_files_are_retained_behind_it(place):
    held, failures = {"version": 0}, []
    committed(place.store, 0, content=b"0")
    newest = {"manifest": place.store.manifest(0)}
    done = threading.Event()

    def read():
        while held["version"] < 40 and not failures:
            manifest = newest["manifest"]
            if manifest.version == held["version"]:
                continue
            try:
                chain = place.store.chain(manifest, held=HeldVersion(0, held["version"]))
                content = [place.store.parts(link)[0].tobytes() for link in chain]
            except WeightSyncError as error:
                failures.append(error)
                return
            if content != [str(link.version).encode() for link in chain]:
                failures.append(content)
            held["version"] = manifest.version
        done.set()

    reader = threading.Thread(target=read)
    reader.start()
    for version in range(1, 41):
        newest["manifest"] = committed(place.store, version, base=version - 1, content=str(version).encode())
        place.store.retain(held["version"])
    reader.join(timeout=60)
    assert (failures, done.is_set()) == ([], True)
    place.store.retain(40)
    assert place.store.versions() == (40,)


@pytest.mark.parametrize("spoil", ["manifest", "folder"])
@pytest.mark.parametrize("anchored", [False, True])
def test_what_cannot_be_read_is_no_way_and_never_an_error_of_the_filesystem(rig, spoil, anchored):
    targets = rig.targets()
    receiver = Receiver(memory_targets(targets), source=rig.store)
    receiver.apply(rig.publish(0, base=None))
    for version in (1, 2):
        rig.change()
        newest = rig.publish(version, base=version - 1)
    folder = rig.root / "v000001"
    if spoil == "folder":
        shutil.rmtree(folder)
        folder.write_bytes(b"no folder")
    else:
        (folder / "delta.json").unlink()
        (folder / "delta.json").mkdir()
    if anchored:
        rig.anchor()
        receiver.apply(newest)
        assert rig.holds(targets)
    else:
        with pytest.raises(WrongBase, match="version 1 is not in the store"):
            receiver.apply(newest)
        assert receiver.version == 0


def test_a_store_that_cannot_be_listed_says_so(rig, monkeypatch):
    receiver = Receiver(memory_targets(rig.targets()), source=rig.store)
    anchor = rig.publish(0, base=None)

    def denied(files, folder=""):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(LocalFiles, "sizes", denied)
    for ask in (rig.store.versions, rig.store.latest, rig.store.newest_epoch, lambda: rig.store.retain(0)):
        with pytest.raises(WeightSyncError, match=r"cannot be read.*Permission denied"):
            ask()
    assert receiver.apply(anchor) == anchor.state_hash  # its parts can
