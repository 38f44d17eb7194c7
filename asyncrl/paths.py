"""Where one run keeps what it writes: a folder that stays, and shared memory that goes with the run."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from asyncrl.errors import ConfigError

_SHARED_PREFIX = "asyncrl"


@dataclass(frozen=True, slots=True)
class RunPaths:
    """The folders of a run."""

    root: Path
    """`runs/NAME`: configuration, metrics, summary, model, checkpoints, logs."""
    shared: Path
    """A folder of this run in shared memory; removed when the run closes."""
    transport: Mapping[str, Any] = field(default_factory=lambda: {"kind": "store"})
    """How published versions get to the engines: the fields of `weights.transport`."""

    @property
    def logs(self) -> Path:
        """Standard output and error of each child."""
        return self.root / "logs"

    @property
    def checkpoints(self) -> Path:
        """Trainer state by step."""
        return self.root / "checkpoints"

    @property
    def weights(self) -> Path:
        """Published versions, where `transport` names no other place."""
        return self.shared / "weights"

    @property
    def batches(self) -> Path:
        """Batches on their way to the trainer ranks."""
        return self.shared / "batches"

    def recorded_batch(self, step: int) -> Path:
        """The batch of a step, as it was corrected."""
        return self.root / "corrections" / f"step-{step:08d}.npz"

    def make(self) -> None:
        """Create every folder. Raises ConfigError where something else is in the way."""
        for folder in (self.root, self.logs, self.checkpoints, self.weights, self.batches):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError("run.folder", value=str(folder), allowed="a folder that can be written, or made",
                                  remedy=f"{error.strerror or error}. Remove what is in the way, or set run.folder.") from error


def recorded_batches(run: Path) -> list[Path]:
    """The batches that a run has recorded, oldest first."""
    return sorted((run / "corrections").glob("step-*.npz"))


def shared_place() -> Path:
    """Shared memory; the temporary folder where there is none that can be written."""
    place = Path("/dev/shm")
    return place if os.access(place, os.W_OK) else Path(tempfile.gettempdir())


def make_shared_folder() -> Path:
    """A new folder of this process in shared memory.

    Folders of processes that were killed are removed first: nobody else would. The name holds the process's namespace: where
    containers share memory, a process id of one says nothing in another.
    """
    place, prefix = _shared_place()
    for left in place.glob(f"{prefix}-*-*"):
        owner = left.name.removeprefix(f"{prefix}-").split("-")[0]
        if owner.isdigit() and left.stat().st_uid == os.getuid() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}-{os.getpid()}-", dir=place))


def remove_shared_folders() -> None:
    """Remove every folder that `make_shared_folder` made in this process: for one that ends at once, without closing its runs."""
    place, prefix = _shared_place()
    for folder in place.glob(f"{prefix}-{os.getpid()}-*"):
        shutil.rmtree(folder, ignore_errors=True)


def _shared_place() -> tuple[Path, str]:
    """Where shared folders lie, and how the names of this process's namespace begin."""
    return shared_place(), f"{_SHARED_PREFIX}-{os.stat('/proc/self/ns/pid').st_ino}"


def sync(path: Path) -> None:
    """Have the content of a file, or the names in a folder, outlive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def claim(folder: Path) -> IO[str]:
    """An open file that keeps `folder` for this process, until it is closed or the process ends.

    Raises ConfigError while another run has it: that one would go on in a folder that was moved, and end in ours.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = _lock_of(folder).open("a", encoding="utf-8")
    except OSError as error:
        raise ConfigError("run.folder", value=str(folder.parent), allowed="a folder that can be written", remedy=f"{error}.") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ConfigError("run.name", value=folder.name, allowed=f"a name that no running run has in {folder.parent}",
                          remedy="Wait for that run, or choose another name.") from None
    return lock


def is_claimed(folder: Path) -> bool:
    """Whether a process has claimed `folder` now. Writes nothing; a folder that is free is locked for an instant, one that is not never."""
    try:
        with _lock_of(folder).open("r", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def _lock_of(folder: Path) -> Path:
    """The file whose lock says that a process has the folder; beside it, for the folder may be moved."""
    return folder.with_name(f".{folder.name}.lock")
