"""Which checkpoints are whole: they get their name when they are, and are verified before use. Needs no torch.

    ROOT/step-00000020/rank-00000-000.safetensors …  what each rank holds
    ROOT/step-00000020/state.msgpack                 what the run around the trainer needs to go on
    ROOT/step-00000020/manifest.json                 sizes, checksums, counters
    ROOT/.step-00000040.unfinished/…                 being written; also .replaced, until the new one has its name, and .deleted

A step draws no random numbers and its learning rate follows from the version, so neither has a state of its own to keep.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shutil
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from asyncrl.errors import CheckpointError
from asyncrl.paths import sync

MANIFEST = "manifest.json"
STATE = "state.msgpack"
_RANK_FILE = re.compile(r"rank-\d{5}-\d{3,}\.safetensors")


@dataclass(frozen=True, slots=True)
class SavedFile:
    """A file of a checkpoint."""

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
    """How often the run was begun or resumed before; of two checkpoints the one with the larger epoch is the newer."""
    files: tuple[SavedFile, ...]
    model: str = ""
    """Checksum of the weights that do not change and are not saved: of the model that adapters were trained on; empty without adapters."""


def checkpoint_folder(root: Path, version: int) -> Path:
    """Where the checkpoint of a version lies."""
    return root / f"step-{version:08d}"


def begin(folder: Path) -> Path:
    """An empty place, beside `folder`, to write a checkpoint's files into; what lies at `folder` stays until `commit`.

    Raises CheckpointError when that is something other than a checkpoint: it would be deleted.
    """
    if folder.exists():
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else [folder.name]
        foreign = [name for name in names if name not in (MANIFEST, STATE) and not _RANK_FILE.fullmatch(name)]
        if foreign:
            raise CheckpointError(f"{folder} is not a checkpoint, it has {foreign[0]}: one does not replace it")
    place = _beside(folder, "unfinished")
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    return place


def commit(folder: Path, *, files: Sequence[SavedFile], version: int, updates: int, run_epoch: int, state: bytes = b"",
           model: str = "") -> None:
    """Make what the ranks wrote, and `state`, the checkpoint at `folder`; an older one there goes only then."""
    place, replaced = _beside(folder, "unfinished"), _beside(folder, "replaced")
    _write_synced(place / STATE, state)
    manifest = CheckpointManifest(version=version, updates=updates, run_epoch=run_epoch, files=(*files, SavedFile.of(place / STATE)),
                                  model=model)
    _write_synced(place / MANIFEST, json.dumps(dataclasses.asdict(manifest), sort_keys=True).encode())
    sync(place)
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        folder.resolve().rename(replaced)
    place.rename(folder.resolve())
    sync(folder.resolve().parent)
    shutil.rmtree(replaced, ignore_errors=True)


def abandon(folder: Path) -> None:
    """Delete what was written since `begin`."""
    shutil.rmtree(_beside(folder, "unfinished"), ignore_errors=True)


def verified(folder: Path) -> CheckpointManifest:
    """The manifest of a whole checkpoint. Raises CheckpointError, naming what is missing or damaged."""
    manifest = _manifest(folder)
    if manifest is None:
        raise CheckpointError(f"checkpoint {folder} is not whole: it has no manifest that can be read")
    for file in manifest.files:
        try:
            found = SavedFile.of(folder / file.name)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"checkpoint {folder} is not whole: {error}") from error
        if found != file:
            raise CheckpointError(f"checkpoint {folder}: {file.name} is not what was written")
    return manifest


def read_state(folder: Path) -> bytes:
    """What the run around the trainer had saved; empty when there was none."""
    return (folder / STATE).read_bytes()


def listed(root: Path) -> list[Path]:
    """Checkpoints under `root` that have a manifest, oldest first: by run epoch, then by version. Their files are not looked at."""
    found = [(manifest.run_epoch, manifest.version, folder) for folder in root.glob("step-*")
             if (manifest := _manifest(folder)) is not None]
    return [folder for _, _, folder in sorted(found)]


def newest(root: Path) -> Path | None:
    """The newest whole checkpoint under `root`, None without any. Warns about each that is passed over."""
    for folder in sorted(folder for folder in root.glob("step-*") if _manifest(folder) is None):
        warnings.warn(f"passed over: checkpoint {folder} has no whole manifest", stacklevel=2)
    for folder in reversed(listed(root)):
        try:
            verified(folder)
        except CheckpointError as error:
            warnings.warn(f"passed over: {error}", stacklevel=2)
        else:
            return folder
    return None


def remove(folder: Path) -> None:
    """Delete a checkpoint; its name goes first, so that half of one is never taken for a whole."""
    place = _beside(folder, "deleted")
    shutil.rmtree(place, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        folder.resolve().rename(place)
    shutil.rmtree(place, ignore_errors=True)


def tidy(root: Path) -> None:
    """Mend what a kill left under `root`: one that was to be replaced gets its name back, what is half written or half deleted goes.

    For the process that owns the folder, before it writes there.
    """
    for left in root.glob(".step-*.*"):
        whole = left.with_name(left.stem.removeprefix("."))
        if left.suffix == ".replaced" and not whole.exists():
            left.rename(whole)
        else:
            shutil.rmtree(left, ignore_errors=True)


def rank_file(rank: int, number: int) -> str:
    """Name of a file that a rank writes, its first having the number 0."""
    return f"rank-{rank:05d}-{number:03d}.safetensors"


@contextlib.contextmanager
def disk_errors_named(folder: Path) -> Iterator[None]:
    """What a full or broken disk does inside is a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder} cannot be written: {error}") from error


def _beside(folder: Path, state: str) -> Path:
    whole = folder.resolve()
    return whole.with_name(f".{whole.name}.{state}")


def _manifest(folder: Path) -> CheckpointManifest | None:
    """What the folder says it holds; None when that cannot be read."""
    try:
        raw = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return CheckpointManifest(**(raw | {"files": tuple(SavedFile(**file) for file in raw["files"])}))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_synced(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    sync(path)
