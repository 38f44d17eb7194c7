"""The weights of the best evaluation so far, as a Hugging Face folder, `best/`, with `evaluation.json` in it.

    best → .best-0                                    a link: what it names changes in one rename, and is whole before
    .best-0/model.safetensors, config.json, …         the weights
    .best-0/evaluation.json                           written last: step, version, and every metric
    .best-1/…                                         the next one, while it is being written
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from asyncrl.paths import sync
from asyncrl.rollout.evaluation import Evaluation

_RECORD = "evaluation.json"


class BestWeights:
    """Keeps the weights for which one metric of one set was highest; of equals the first.

    A kill at any moment leaves `best/` as it was or as it is to be.
    """

    def __init__(self, folder: Path, *, set_name: str, metric: str) -> None:
        self.path = folder / "best"
        self._places = (folder / ".best-0", folder / ".best-1")
        self._set, self._metric = set_name, metric
        self._value: float | None = None
        self.step: int | None = None
        """Step after which it was evaluated; None before the first."""
        self.reward: float | None = None
        """Mean reward of the set then."""

    def resume(self, version: int) -> None:
        """Go on from what `best/` holds, for a run that goes on from `version`: a later one is not of its history, and is passed over."""
        try:
            record = json.loads((self.path / _RECORD).read_text(encoding="utf-8"))
            if record["version"] <= version:
                self._note(record["metrics"], step=record["step"])
        except (OSError, ValueError, KeyError, TypeError):
            return

    async def offer(self, evaluation: Evaluation, *, step: int, export: Callable[[Path], Awaitable[None]]) -> bool:
        """Keep the weights that `export` writes, those of this evaluation, if it is the best so far; returns whether it was."""
        value = evaluation[self._set].metrics.get(f"{self._metric}/mean")
        if value is None or (self._value is not None and value <= self._value):
            return False
        place = self._free_place()
        await export(place)
        self._commit(place, {"step": step, "version": evaluation.version_max, "set": self._set, "metric": self._metric, "value": value,
                             "metrics": evaluation.metrics})
        self._note(evaluation.metrics, step=step)
        return True

    def _free_place(self) -> Path:
        """The place that `best/` does not name, emptied."""
        held = self.path.readlink().name if self.path.is_symlink() else ""
        place = next(place for place in self._places if place.name != held)
        shutil.rmtree(place, ignore_errors=True)
        return place

    def _commit(self, place: Path, record: Mapping[str, Any]) -> None:
        """Make what lies at `place` the folder `best/`."""
        (place / _RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        for file in (*place.iterdir(), place):
            sync(file)
        if self.path.is_dir() and not self.path.is_symlink():
            # the run's folder was copied by something that follows links
            shutil.rmtree(self._other(place), ignore_errors=True)
            self.path.rename(self._other(place))
        link = self.path.with_name(".best")
        link.unlink(missing_ok=True)
        link.symlink_to(place.name)
        link.replace(self.path)
        sync(self.path.parent)
        shutil.rmtree(self._other(place), ignore_errors=True)

    def _other(self, place: Path) -> Path:
        return next(other for other in self._places if other != place)

    def _note(self, metrics: dict[str, float], *, step: int) -> None:
        self._value = float(metrics[f"eval/{self._set}/{self._metric}/mean"])
        self.reward, self.step = metrics[f"eval/{self._set}/reward/mean"], step
