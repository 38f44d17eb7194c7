"""Weights & Biases, written by one thread of its own: a tracker that blocks or raises costs rows, never the run."""

from __future__ import annotations

import importlib.util
import netrc
import os
import queue
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from asyncrl.errors import ConfigError

_END = None


def require_wandb() -> None:
    """Raise ConfigError when wandb is not installed."""
    known = sys.modules["wandb"] if "wandb" in sys.modules else importlib.util.find_spec("wandb")
    if known is None:
        raise ConfigError("run.wandb.kind", value="wandb", allowed="none, unless wandb is installed",
                          remedy="pip install wandb, into the environment this runs in.")


class WandbWriter:
    """One writer with axes of its own: trainer metrics over `trainer_step`, evaluations over `eval_version`. The run of a known id goes on.

    Everything but the import happens in the thread, the start of the run included. Offline when no key is set or stored. `dropped` counts
    the rows that were not written, `error` is the newest reason. Raises ConfigError when wandb is not installed.
    """

    def __init__(self, *, project: str, name: str, run_id: str, config: Mapping[str, Any], folder: Path, capacity_rows: int = 1000) -> None:
        require_wandb()
        import wandb

        self.error = ""
        self._wandb = wandb
        self._handed_over = self._written = 0
        self._rows: queue.Queue[dict[str, Any] | None] = queue.Queue(maxsize=capacity_rows)
        settings = {"project": project, "name": name, "id": run_id, "resume": "allow", "config": dict(config), "dir": str(folder),
                    "mode": wandb_mode()}
        self._thread = threading.Thread(target=self._write_all, args=(settings,), name="wandb", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Rows handed over that were not written; before `close`, those that wait count too."""
        return self._handed_over - self._written

    def write(self, row: Mapping[str, Any]) -> None:
        """Hand over one row; never blocks, never raises."""
        self._handed_over += 1
        try:
            self._rows.put_nowait(dict(row))
        except queue.Full:
            self.error = f"{self._rows.maxsize} rows wait for the tracker"

    def close(self, timeout_s: float = 30.0) -> None:
        """Write what is left, for at most `timeout_s`; what is not written by then is dropped."""
        try:
            self._rows.put(_END, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _write_all(self, settings: Mapping[str, Any]) -> None:
        try:
            run = self._wandb.init(**settings)
            run.define_metric("trainer_step")
            run.define_metric("eval_version")
            run.define_metric("eval/*", step_metric="eval_version")
            run.define_metric("*", step_metric="trainer_step")
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
            run = None
        while (row := self._rows.get()) is not _END:
            self._log(run, row)
        self._finish(run)

    def _log(self, run: Any, row: Mapping[str, Any]) -> None:
        try:
            if run is not None:
                run.log(row)
                self._written += 1
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"

    def _finish(self, run: Any) -> None:
        try:
            if run is not None:
                run.finish()
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"


def wandb_mode() -> str:
    """How a run's tracker would start: as WANDB_MODE says; else online when a key is set or stored, or offline."""
    return os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") or _has_login() else "offline")


def _has_login() -> bool:
    """Whether `wandb login` has left a key for the host in use."""
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
