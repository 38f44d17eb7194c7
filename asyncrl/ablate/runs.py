"""Runs of an ablation as children, so many at once: each bounded in time, none outlives this process, none ends another."""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from pydantic import Field

from asyncrl.ablate.grid import PlannedRun
from asyncrl.ablate.origin import commit
from asyncrl.config import dump_config
from asyncrl.process import die_with_parent, signal_name
from asyncrl.settings import Section

_RECORD = "ablation.json"
"""In the folder of a run that has ended; written last."""
_MODELS = ("model", "best", "checkpoints")
"""What is large in the folder of a run."""
_PATIENCE_S = (1.0, 10.0)
"""How long a run may take to end after each SIGTERM. It is done again anyway, so its step need not be finished: the second, not too soon
after the first, has it free its shared memory and go."""
_LAST_LINES = 5
_LAST_BYTES = 4096


class Record(Section):
    """How a run ended."""

    key: str
    wall_s: float = Field(ge=0)
    """Of the whole process."""
    commit: str | None
    """Of the library's source; None where it is no checkout."""
    error: str | None = None
    """Why it failed; None where it did not."""


def record_of(run: PlannedRun) -> Record | None:
    """How this very run ended before; None when it was never run to an end, or with other settings, or its record is damaged."""
    try:
        record = Record.model_validate_json((run.folder / _RECORD).read_bytes())
    except (OSError, ValueError):
        return None
    return record if record.key == run.key else None


def is_damaged(run: PlannedRun) -> bool:
    """Whether something lies where the run has its folder or its record, and is neither."""
    return (os.path.lexists(run.folder) and not run.folder.is_dir()) or (os.path.lexists(run.folder / _RECORD) and record_of(run) is None)


def waves(runs: Sequence[PlannedRun]) -> list[list[PlannedRun]]:
    """First one run of each model, then the others: they find its warm-up in the cache, and none makes it twice."""
    first: dict[str, PlannedRun] = {}
    for run in runs:
        first.setdefault(run.config.model_dump_json(include={"model", "warm_up"}), run)
    chosen = list(first.values())
    return [chosen, [run for run in runs if not any(run is one for one in chosen)]]


async def run_all(runs: Sequence[PlannedRun], *, jobs: int, timeout_s: float,
                  keep_models: bool) -> AsyncIterator[tuple[PlannedRun, Record]]:
    """Run them, `jobs` at once; gives each as it ends. Closed or cancelled, it ends the children first."""
    places = asyncio.Semaphore(jobs)

    async def one(run: PlannedRun) -> tuple[PlannedRun, Record]:
        async with places:
            return run, await _run(run, timeout_s=timeout_s, keep_models=keep_models)

    for wave in waves(runs):
        tasks = left = {asyncio.create_task(one(run), name=str(run)) for run in wave}
        try:
            while left:
                ended, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    yield task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _run(run: PlannedRun, *, timeout_s: float, keep_models: bool) -> Record:
    """One child, from its configuration to its record. What an earlier try left is removed."""
    _remove(run.folder)
    files = run.folder.parent.parent
    for folder in (run.folder.parent, files / "configs", files / "logs"):
        folder.mkdir(parents=True, exist_ok=True)
    recipe, log = (files / folder / f"{run.folder.name}{suffix}" for folder, suffix in (("configs", ".yaml"), ("logs", ".log")))
    recipe.write_text(dump_config(run.config), encoding="utf-8")
    began_s = time.monotonic()
    error = None
    async with _child(recipe, log=log) as process:
        try:
            async with asyncio.timeout(timeout_s):
                code = await process.wait()
            if code:
                error = f"{_how(code)}: {_tail(log)}"
        except TimeoutError:
            error = f"ended after timeout_s = {timeout_s:g}: {_tail(log)}"
    record = Record(key=run.key, wall_s=round(time.monotonic() - began_s, 2), commit=commit(), error=error)
    if not keep_models:
        for name in _MODELS:
            shutil.rmtree(run.folder / name, ignore_errors=True)
    run.folder.mkdir(exist_ok=True)
    (run.folder / _RECORD).write_text(record.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return record


def command_of(recipe: Path) -> list[str]:
    """What a run is started with; by hand it does the same."""
    return [sys.executable, "-m", "asyncrl.cli", "train", str(recipe), "--quiet"]


@asynccontextmanager
async def _child(recipe: Path, *, log: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that trains as `recipe` says; ended on the way out, whatever the way."""
    with log.open("wb") as output:
        # A session of its own: Ctrl-C on the terminal is for this process, which ends its children itself.
        process = await asyncio.create_subprocess_exec(
            *command_of(recipe), stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            preexec_fn=functools.partial(die_with_parent, os.getpid()))
    try:
        yield process
    finally:
        for patience_s in _PATIENCE_S:
            if process.returncode is None:
                process.terminate()
                await asyncio.wait({asyncio.ensure_future(process.wait())}, timeout=patience_s)
        if process.returncode is None:
            process.kill()
            await process.wait()


def _how(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    return f"killed by {signal_name(-code)}"


def _remove(folder: Path) -> None:
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def _tail(log: Path) -> str:
    """The last lines of what the run said."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
        lines = [line for line in file.read().decode("utf-8", errors="replace").splitlines() if line.strip()]
    return "\n".join(lines[-_LAST_LINES:]) or "it said nothing"
