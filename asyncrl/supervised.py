"""The job of `asyncrl sft`: from a recipe to a folder with a trained model, its metrics and a summary."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from asyncrl import yaml_text
from asyncrl.config import resolved_tree
from asyncrl.errors import ConfigError
from asyncrl.functions import check_arguments, load_function
from asyncrl.observe.jsonl import JsonlWriter, cut_jsonl
from asyncrl.paths import claim
from asyncrl.recipe_files import find_recipe, supervised_names
from asyncrl.run_folder import move_aside
from asyncrl.run_state import Resume, find_checkpoint
from asyncrl.settings import validated
from asyncrl.train.checkpoint_store import checkpoint_folder, listed, remove
from asyncrl.train.examples import Row
from asyncrl.train.history import KEPT_CHECKPOINTS
from asyncrl.train.sft import SFTStep, SFTTrainer
from asyncrl.train.sft_config import UNREAD, FunctionExamples, JsonlExamples, NoExamples, SFTConfig, refuse_settings_of_rl
from asyncrl.training import prepare_model

Tell = Callable[[str], None]


def load_sft(recipe: str | Path, overrides: Sequence[str] = (), *, echo: Tell | None = None) -> SFTConfig:
    """The supervised run that a YAML file, or a recipe of the library by name, describes. Raises ConfigError as `load_config` does."""
    file = find_recipe(recipe, names=supervised_names())
    return validated(SFTConfig, resolved_tree(file, overrides, root=SFTConfig, echo=echo))


async def supervise(config: SFTConfig, *, tell: Tell, resume: Resume = None) -> dict[str, Any]:
    """Train, and write everything under `run.folder/run.name`: `model/`, checkpoints, metrics, logs. Returns the summary.

    Cancelled, it finishes the update under way and saves before it goes; where that fails it is this failure that is raised.
    """
    folder = Path(config.run.folder) / config.run.name
    with claim(folder):
        checkpoint = find_checkpoint(folder / "checkpoints", resume) if resume else None
        with _place(folder, is_new=checkpoint is None, tell=tell):
            course = await _begun(config, folder=folder, checkpoint=checkpoint, tell=tell)
        try:
            await _finishing_the_step(course)
        finally:
            await course.close()
        return course.summary()


@contextmanager
def _place(folder: Path, *, is_new: bool, tell: Tell) -> Iterator[None]:
    """The folder, with an earlier run of its name out of the way; a run that is refused before its first update gives the place back."""
    kept = move_aside(folder) if is_new else None
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except ConfigError:
        if is_new:
            shutil.rmtree(folder)
        if kept is not None:
            kept.rename(folder)
        raise
    if kept is not None:
        tell(f"an earlier run of this name is kept as {kept}")


async def _begun(config: SFTConfig, *, folder: Path, checkpoint: Path | None, tell: Tell) -> _Course:
    """Everything up to the first update."""
    (folder / "config.yaml").write_text(yaml_text.write(config.model_dump(mode="json")), encoding="utf-8")
    model = await prepare_model(config, logs=folder / "logs", echo=tell)
    course = _Course(config, trainer=_trainer(config, model), folder=folder, tell=tell)
    try:
        await course.trainer.start(folder, deterministic=config.run.deterministic)
        if checkpoint is not None:
            await course.trainer.restore(checkpoint)
            tell(f"resumed after step {course.trainer.version} of {course.trainer.total_steps}")
    except BaseException:
        await course.close()
        raise
    return course


def _trainer(config: SFTConfig, model: Path) -> SFTTrainer:
    """Raises ConfigError for a row, named as the recipe names its section."""
    refuse_settings_of_rl(config.trainer)
    settings = {name: value for name, value in dict(config.trainer).items() if name not in UNREAD}
    sections = {"examples": "data", "held_out": "eval", **{name: f"sft.{name}" for name in ("max_steps", "batch_size", "epochs")}}
    try:
        return SFTTrainer(model, _rows(config.data, field="data", seed=config.sft.seed),
                          held_out=_rows(config.eval, field="eval", seed=config.sft.seed), batch_size=config.sft.batch_size,
                          epochs=config.sft.epochs, max_steps=config.sft.max_steps, seed=config.sft.seed, lora=config.lora, **settings)
    except ConfigError as error:
        name, *rest = error.field.split(" ")
        raise error.moved(error.field, " ".join([sections.get(name, name), *rest])) from error


def _rows(section: JsonlExamples | FunctionExamples | NoExamples, *, field: str, seed: int) -> Any:
    if isinstance(section, NoExamples):
        return ()
    if isinstance(section, JsonlExamples):
        return Path(section.path)
    function = load_function(section.function, field=f"{field}.function")
    check_arguments(function, field=field, arguments=section.arguments, seed=seed)
    rows: Row = function(seed=seed, **section.arguments)
    return rows


async def _finishing_the_step(course: _Course) -> None:
    task = asyncio.ensure_future(course.run())
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        course.is_stopped = True
        await asyncio.wait({task})
        task.result()  # what the last step failed with, or its save, says more than that it was stopped
        raise


class _Course:
    """The updates of a run, and what it writes as they are made."""

    def __init__(self, config: SFTConfig, *, trainer: SFTTrainer, folder: Path, tell: Tell) -> None:
        self.trainer = trainer
        self.is_stopped = False
        self._config, self._folder, self._tell = config, folder, tell
        self._rows: list[dict[str, float]] = []
        self._metrics: JsonlWriter | None = None
        self._began_s = time.monotonic()

    async def run(self) -> None:
        """To the last step, or to a checkpoint where it is stopped before."""
        path = self._folder / "metrics.jsonl"
        self._rows = cut_jsonl(path, keep=lambda row: row.get("trainer_step", 0) <= self.trainer.version)
        self._metrics = JsonlWriter(path)
        every = self._config.trainer.checkpoint_every_steps
        if not self._rows:
            await self._note(None)
        while self.trainer.version < self.trainer.total_steps:
            await asyncio.sleep(0)  # a trainer in this process waits for nothing: who stops it is heard here
            if self.is_stopped:
                break
            step = await self.trainer.step()
            is_last = step.index == self.trainer.total_steps
            await self._note(step, measured=is_last or step.index % self._config.sft.eval_every_steps == 0)
            if is_last or (every is not None and step.index % every == 0):
                await self._save()
        if self.trainer.version < self.trainer.total_steps:
            await self._save()
        else:
            await self.trainer.export(self._folder / "model", dtype=self._config.sft.export_dtype)

    def summary(self) -> dict[str, Any]:
        """Write summary.json. Returns what is in it."""
        losses, held_out = ([value for row in self._rows if (value := row.get(name)) is not None and math.isfinite(value)]
                            for name in ("train/loss/mean", "held_out/loss/mean"))
        summary = {"steps": self.trainer.version, **_ends(losses, "loss_first", "loss_last"),
                   **_ends(held_out, "held_out_before", "held_out_after"), "wall_s": time.monotonic() - self._began_s}
        (self._folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        return summary

    async def close(self) -> None:
        """Close the file, and end the ranks."""
        if self._metrics is not None:
            self._metrics.close()
        await self.trainer.close()

    async def _note(self, step: SFTStep | None, *, measured: bool = True) -> None:
        row: dict[str, float] = {"trainer_step": self.trainer.version}
        if step is not None:
            row |= {"train/loss/mean": step.loss, "train/tokens/sum": step.tokens, "train/grad_norm/last": step.grad_norm,
                    "train/learning_rate/last": step.learning_rate, "train/skipped_steps/sum": int(bool(step.skipped))}
        if measured and not isinstance(self._config.eval, NoExamples):
            known = await self.trainer.evaluate()
            row |= {"held_out/loss/mean": known.loss, "held_out/accuracy/mean": known.accuracy}
        if len(row) > 1:
            assert self._metrics is not None
            self._metrics.write(row)
            self._rows.append(row)
        if measured:
            self._tell(_line(row, of=self.trainer.total_steps))

    async def _save(self) -> None:
        root = self._folder / "checkpoints"
        root.mkdir(exist_ok=True)
        await self.trainer.save(checkpoint_folder(root, self.trainer.version))
        for old in listed(root)[:-KEPT_CHECKPOINTS]:
            remove(old)


def _ends(values: Sequence[float], first: str, last: str) -> dict[str, float | None]:
    return {first: values[0] if values else None, last: values[-1] if values else None}


def _line(row: dict[str, float], *, of: int) -> str:
    shown = {"loss": "train/loss/mean", "held out": "held_out/loss/mean", "accuracy": "held_out/accuracy/mean",
             "learning rate": "train/learning_rate/last"}
    parts = [f"{name} {row[metric]:.4g}" for name, metric in shown.items() if metric in row]
    return ", ".join([f"step {row['trainer_step']} of {of}", *parts])
