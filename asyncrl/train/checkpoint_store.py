"""Which checkpoints are whole: they get their name when they are, and are verified before use. Needs no torch.

    ROOT/step-00000020/rank-00000.safetensors …      what each rank holds
    ROOT/step-00000020/manifest.json                 sizes, checksums, counters
    ROOT/.step-00000040.unfinished/…                 being written

A step draws no random numbers and its learning rate follows from the version, so neither has a state of its own to keep.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from asyncrl.errors import CheckpointError

MANIFEST = "manifest.json"
_RANK_FILE = re.compile(r"rank-\d{5}\.safetensors")


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


def begin(folder: Path) -> Path:
    """An empty place, beside `folder`, to write a checkpoint's files into; what lies at `folder` stays until `commit`.

    Raises CheckpointError when that is something other than a checkpoint: it would be deleted.
    """
    if folder.exists():
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else [folder.name]
        foreign = [name for name in names if name != MANIFEST and not _RANK_FILE.fullmatch(name)]
        if foreign:
            raise CheckpointError(f"{folder} is not a checkpoint, it has {foreign[0]}: one does not replace it")
    place = _beside(folder, "unfinished")
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    return place


def commit(folder: Path, *, names: Sequence[str], version: int, updates: int, run_epoch: int) -> None:
    """Make what the ranks wrote, files of these names, the checkpoint at `folder`; an older one there goes only then."""
    place, replaced = _beside(folder, "unfinished"), _beside(folder, "replaced")
    manifest = CheckpointManifest(version=version, updates=updates, run_epoch=run_epoch,
                                  files=tuple(SavedFile.of(place / name) for name in names))
    with (place / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(dataclasses.asdict(manifest), file, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        folder.resolve().rename(replaced)
    place.rename(folder.resolve())
    shutil.rmtree(replaced, ignore_errors=True)


def abandon(folder: Path) -> None:
    """Delete what was written since `begin`."""
    shutil.rmtree(_beside(folder, "unfinished"), ignore_errors=True)


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


def rank_file(rank: int) -> str:
    """Name of the file a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def _beside(folder: Path, state: str) -> Path:
    whole = folder.resolve()
    return whole.with_name(f".{whole.name}.{state}")
