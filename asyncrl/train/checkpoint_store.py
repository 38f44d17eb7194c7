"""Which checkpoints are whole: written under a name that says so only at the end, verified before use. Needs no torch.

    ROOT/step-00000020/rank-00000.safetensors …      what each rank holds
    ROOT/step-00000020/manifest.json                 written last: sizes, checksums, counters

A step draws no random numbers and its learning rate follows from the version, so neither has a state of its own to keep.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from asyncrl.errors import CheckpointError

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class SavedFile:
    """One rank's file."""

    name: str
    bytes: int
    xxh3: str

    @classmethod
    def of(cls, path: Path) -> SavedFile:
        """Size and checksum of a file that is there."""
        size = path.stat().st_size
        data = np.memmap(path, np.uint8, mode="r") if size else np.empty(0, np.uint8)
        return cls(name=path.name, bytes=size, xxh3=xxhash.xxh3_128_hexdigest(data))


@dataclass(frozen=True, slots=True)
class CheckpointManifest:
    """What a whole checkpoint holds."""

    version: int
    """Policy version of the weights; the schedule follows from it."""
    updates: int
    """Optimizer updates behind them, AdamW's step count."""
    run_epoch: int
    files: tuple[SavedFile, ...]


def checkpoint_folder(root: Path, version: int) -> Path:
    """Where the checkpoint of a version lies."""
    return root / f"step-{version:08d}"


def begin(folder: Path) -> str:
    """Make room for a checkpoint, removing what lies there; the folder's absolute path."""
    remove(folder)
    folder.mkdir(parents=True)
    return str(folder.resolve())


def commit(folder: Path, manifest: CheckpointManifest) -> None:
    """Make a checkpoint whole: its files are written and synced; the manifest follows."""
    temporary = folder / f".{MANIFEST}"
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(dataclasses.asdict(manifest), file, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / MANIFEST)


def verified(folder: Path) -> CheckpointManifest:
    """The manifest of a whole checkpoint. Raises CheckpointError, naming what is missing or damaged."""
    try:
        raw = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        manifest = CheckpointManifest(**(raw | {"files": tuple(SavedFile(**file) for file in raw["files"])}))
        for file in manifest.files:
            if SavedFile.of(folder / file.name) != file:
                raise CheckpointError(f"checkpoint {folder}: {file.name} is not what was written")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint {folder} is not whole: {error}") from error
    return manifest


def newest(root: Path) -> Path | None:
    """The newest whole checkpoint under `root`, None without any. Warns about each newer one that is not whole."""
    for folder in sorted(root.glob("step-*"), reverse=True):
        try:
            verified(folder)
        except CheckpointError as error:
            warnings.warn(f"passed over: {error}", stacklevel=2)
        else:
            return folder
    return None


def remove(folder: Path) -> None:
    """Delete a checkpoint; its manifest goes first, so that half of one is never taken for a whole."""
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def rank_files(folder: Path, names: Sequence[str]) -> tuple[SavedFile, ...]:
    """Size and checksum of the files the ranks wrote."""
    return tuple(SavedFile.of(folder / name) for name in names)
