"""Weights & Biases, written by one thread of its own: a tracker that blocks or raises costs rows, never the run."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError

_END = None
_CLOSE_TIMEOUT_S = 30.0


class WandbWriter:
    """One writer with axes of its own: trainer metrics over `trainer_step`, evaluations over `eval_version`.

    Offline when no key is set. `dropped` counts the rows that could not be written.
    """

    def __init__(self, *, project: str, name: str, config: Mapping[str, Any], folder: Path, capacity_rows: int = 1000) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError("run.wandb.kind", value="wandb", allowed="none, unless wandb is installed",
                              remedy="pip install 'asyncrl[wandb]'.") from error
        mode = "online" if os.environ.get("WANDB_API_KEY") else "offline"
        self.dropped = 0
        self._rows: queue.Queue[dict[str, Any] | None] = queue.Queue(maxsize=capacity_rows)
        self._run = wandb.init(project=project, name=name, config=dict(config), dir=str(folder), mode=os.environ.get("WANDB_MODE", mode))
        self._run.define_metric("trainer_step")
        self._run.define_metric("eval_version")
        self._run.define_metric("eval/*", step_metric="eval_version")
        self._run.define_metric("*", step_metric="trainer_step")
        self._thread = threading.Thread(target=self._drain, name="wandb", daemon=True)
        self._thread.start()

    def write(self, row: Mapping[str, Any]) -> None:
        """Hand over one row; never blocks."""
        try:
            self._rows.put_nowait(dict(row))
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Write what is left, for at most half a minute."""
        try:
            self._rows.put(_END, timeout=_CLOSE_TIMEOUT_S)
        except queue.Full:
            self.dropped += self._rows.qsize()
            return
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _drain(self) -> None:
        while (row := self._rows.get()) is not _END:
            try:
                self._run.log(row)
            except Exception:
                self.dropped += 1
        self._run.finish(quiet=True)
