"""Stores on whatever they can lie on, and hands behind their back."""

from __future__ import annotations

from pathlib import Path

import fsspec

from asyncrl.weights.files import LocalFiles
from asyncrl.weights.manifest import Manifest
from asyncrl.weights.remote_files import RemoteFiles
from asyncrl.weights.store import StoreTransport

KINDS = ("shared", "durable", "remote", "packed", "remote packed")


class Place:
    def __init__(self, kind: str, root: Path, **settings: int) -> None:
        self.is_remote = "remote" in kind
        self.url = f"memory://{root}" if self.is_remote else str(root)
        self.raw = fsspec.core.url_to_fs(self.url)[0]
        self.files = RemoteFiles(self.url) if self.is_remote else LocalFiles(root, durable=kind == "durable")
        self.store = StoreTransport(self.files, compression="zstd" if "packed" in kind else "none", **settings)

    def names(self) -> list[str]:
        return sorted(path.rpartition("/weights/")[2] for path in self.raw.find(self.url))

    def read(self, path: str) -> bytes:
        return self.raw.cat_file(f"{self.url}/{path}")

    def write(self, path: str, content: bytes) -> None:
        self.raw.pipe_file(f"{self.url}/{path}", content)

    def move(self, path: str, other: str) -> None:
        self.raw.makedirs(f"{self.url}/{other}".rpartition("/")[0], exist_ok=True)
        self.write(other, self.read(path))
        self.remove(path)

    def remove(self, path: str) -> None:
        self.raw.rm_file(f"{self.url}/{path}")


def written(store: StoreTransport, version: int, *, base: int | None = None, state_hash: int | None = None, run_epoch: int = 0,
            content: bytes = b"abcd" * 300) -> Manifest:
    part = store.put_part(version, rank=0, bucket=0, chunks=[content])
    return Manifest(run_epoch=run_epoch, version=version, base=base, parts=(part,), tensors=(),
                    state_hash=version if state_hash is None else state_hash)


def committed(store: StoreTransport, version: int, **settings: object) -> Manifest:
    manifest = written(store, version, **settings)
    store.commit(manifest)
    return manifest
