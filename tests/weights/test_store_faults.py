"""Publishers that die and disks that are full: a version is whole or not there, and the next publication heals what was left."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from asyncrl.errors import WeightSyncError
from asyncrl.weights.files import LocalFiles
from asyncrl.weights.manifest import Manifest
from asyncrl.weights.receiver import Receiver
from asyncrl.weights.remote_files import RemoteFiles
from asyncrl.weights.store import StoreTransport
from asyncrl.weights.torch_pieces import memory_targets


@pytest.fixture(scope="module", params=["shared", pytest.param("durable", marks=pytest.mark.slow), "packed"])
def killed(request, tmp_path_factory):
    script = Path(__file__).with_name("killed_publisher.py")
    done = subprocess.run([sys.executable, "-m", "tests.weights.killed_publisher", str(tmp_path_factory.mktemp("killed")), request.param],
                          capture_output=True, text=True, timeout=300, check=False, cwd=script.parents[2])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_publisher_killed_at_any_line_leaves_a_version_whole_or_not_there(killed):
    assert killed["rounds"] > 50
    assert killed["seen"]["absent"] + killed["seen"]["whole"] == killed["rounds"]
    assert min(killed["seen"]["absent"], killed["seen"]["whole"]) > 0


def test_a_file_that_may_not_grow_is_an_error_that_leaves_nothing(killed):
    assert [reason for reason in killed["seen"] if "File too large" in reason] == [reason for reason in killed["seen"] if " " in reason]
    assert len(killed["seen"]) == 3
    assert killed["left"] == 0


class FullDisk:
    """Lets so many writes pass, and no other."""

    def __init__(self, patch, writes):
        self.left = writes
        real_open, real_pipe = Path.open, MemoryFileSystem.pipe_file
        disk = self

        class File:
            def __init__(self, file):
                self._file = file

            def __enter__(self):
                return self

            def __exit__(self, *error):
                self._file.close()

            def __getattr__(self, name):
                return getattr(self._file, name)

            def write(self, data):
                disk.spend()
                return self._file.write(data)

        def opened(path, mode="r", *arguments, **settings):
            file = real_open(path, mode, *arguments, **settings)
            return File(file) if "x" in mode else file

        def piped(files, path, value, **settings):
            disk.spend()
            return real_pipe(files, path, value, **settings)

        real_write = MemoryFile.write

        def written(file, data):
            disk.spend()
            return real_write(file, data)

        patch.setattr(Path, "open", opened)
        patch.setattr(MemoryFileSystem, "pipe_file", piped)
        patch.setattr(MemoryFile, "write", written)

    def spend(self):
        if self.left == 0:
            raise OSError(28, "No space left on device")
        self.left -= 1


@pytest.mark.parametrize("kind", ["shared", "durable", "remote", "packed"])
def test_a_disk_that_is_full_at_any_write_changes_nothing_and_the_next_version_holds_all_updates(make_rig, tmp_path, kind):
    url = f"memory://{tmp_path}/weights"
    files = RemoteFiles(url) if kind == "remote" else LocalFiles(tmp_path / "weights", durable=kind == "durable")
    rig = make_rig(store=StoreTransport(files, compression="zstd" if kind == "packed" else "none"), part_bytes=300)
    targets = rig.targets()
    receiver = Receiver(memory_targets(targets), source=rig.store)
    receiver.apply(rig.publish(0, base=None))
    before = set(files.sizes())
    manifest = None
    for writes in range(100):
        rig.change(0.4)
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(WeightSyncError):
            FullDisk(patch, writes)
            manifest = rig.publish(1, base=rig.publisher.version)
        if manifest is not None:
            break
        rig.publisher.abandon()
        assert rig.store.versions() == (0,)
        assert {path for path in files.sizes() if path.startswith("v000000") or "/." in path} == before
        assert all(files.sizes().values())
    assert writes > 2
    receiver.apply(manifest)
    assert rig.holds(targets)


def test_chunks_that_fail_leave_nothing(tmp_path):
    def chunks():
        yield b"abc"
        raise MemoryError

    for files in (LocalFiles(tmp_path / "weights", durable=True), RemoteFiles(f"memory://{tmp_path}/weights")):
        with pytest.raises(MemoryError):
            StoreTransport(files).put_part(0, rank=0, bucket=0, chunks=chunks())
        assert files.sizes() == {}


def test_a_manifest_is_durable_only_after_its_parts(tmp_path, monkeypatch):
    happened = []
    replace, fsync = Path.replace, os.fsync
    monkeypatch.setattr(Path, "replace", lambda path, target: (happened.append(f"name {target.name[:4]}"), replace(path, target))[1])
    monkeypatch.setattr("asyncrl.weights.files.os.fsync", lambda descriptor: (happened.append("content"), fsync(descriptor))[1])
    monkeypatch.setattr("asyncrl.weights.files.sync", lambda path: happened.append(f"folder {path.name}"))
    store = StoreTransport(LocalFiles(tmp_path / "root", durable=True))
    part = store.put_part(0, rank=0, bucket=0, chunks=[b"abc"])
    store.commit(Manifest(run_epoch=0, version=0, base=None, parts=(part,), tensors=(), state_hash=0))
    assert happened == [step for name in ("part", "anch") for step in ("content", f"name {name}", "folder v000000", "folder root")]
