"""Where one run keeps what it writes: a folder that stays, and shared memory that goes with the run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunPaths:
    """The folders of a run."""

    root: Path
    """`runs/NAME`: configuration, metrics, summary, model, checkpoints, logs."""
    shared: Path
    """A folder of this run in shared memory; removed when the run closes."""

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
        """The store of published versions."""
        return self.shared / "weights"

    @property
    def batches(self) -> Path:
        """Batches on their way to the trainer ranks."""
        return self.shared / "batches"

    def make(self) -> None:
        """Create every folder."""
        for folder in (self.root, self.logs, self.checkpoints, self.weights, self.batches):
            folder.mkdir(parents=True, exist_ok=True)
