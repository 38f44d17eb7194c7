"""What it takes to make the trainer's version again: the newest whole checkpoint, and every batch trained since. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.train import checkpoint_store
from asyncrl.train.checkpoint_store import CheckpointManifest, SavedFile

KEPT_CHECKPOINTS = 2
"""The newest, and the one before it in case the newest is damaged on disk."""


@dataclass(frozen=True, slots=True)
class Saving:
    """A checkpoint whose files the ranks are writing."""

    folder: Path
    version: int
    updates: int
    run_epoch: int
    state: bytes
    model: str = ""
    """See `CheckpointManifest.model`."""

    def commit(self, replies: Sequence[Mapping[str, Any]]) -> None:
        """Every rank has written its files: the checkpoint is whole."""
        files = [SavedFile(**file) for reply in replies for file in reply["files"]]
        checkpoint_store.commit(self.folder, files=files, version=self.version, updates=self.updates, run_epoch=self.run_epoch,
                                state=self.state, model=self.model)


class History:
    """The newest checkpoint and the batch files since it, in order; files go once a checkpoint makes them needless."""

    def __init__(self) -> None:
        self.base: Path | None = None
        """None: the initial model."""
        self._batches: list[tuple[int, Path]] = []
        self._checkpoints: list[Path] = []

    @property
    def batches(self) -> tuple[Path, ...]:
        """Trained since the base, oldest first."""
        return tuple(file for _, file in self._batches)

    def trained(self, version: int, file: Path) -> None:
        """The batch in `file` was trained, and made `version`."""
        self._batches.append((version, file))

    def rebase(self, folder: Path, version: int) -> None:
        """A whole checkpoint of `version` lies at `folder`."""
        self.base = folder
        self.forget(version)

    def is_base(self, folder: Path) -> bool:
        """Whether recovery starts from what lies at `folder`."""
        return self.base is not None and self.base.resolve() == folder.resolve()

    def forget(self, version: int) -> None:
        """The batches up to `version` need not be trained again."""
        for made, file in self._batches:
            if made <= version:
                file.unlink(missing_ok=True)
        self._batches = [(made, file) for made, file in self._batches if made > version]

    def keep(self, folder: Path) -> None:
        """Count a checkpoint among those the trainer makes and deletes by itself."""
        self._checkpoints = [*(kept for kept in self._checkpoints if kept != folder), folder]
        while len(self._checkpoints) > KEPT_CHECKPOINTS:
            checkpoint_store.remove(self._checkpoints.pop(0))

    def take_over(self, folders: Sequence[Path]) -> None:
        """Checkpoints that an earlier process left, oldest first."""
        self._checkpoints = list(folders)


def restore_request(folder: Path, manifest: CheckpointManifest) -> dict[str, Any]:
    """What each rank is told to load."""
    return {"folder": str(folder.resolve()), "updates": manifest.updates, "model": manifest.model}
