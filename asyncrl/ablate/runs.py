"""Runs of an ablation as children, so many at once: each bounded in time, none outlives this process, none ends another."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from asyncrl.ablate.grid import PlannedRun
from asyncrl.ablate.origin import commit
from asyncrl.config import dump_config
from asyncrl.process import die_with_parent

_RECORD = "ablation.json"
"""In the folder of a run that has ended; written last."""
_MODELS = ("model", "best", "checkpoints")
"""What is large in the folder of a run."""
_PATIENCE_S = (1.0, 10.0)
"""How long a run may take to end after each SIGTERM. It is done again anyway, so its step need not be finished: the second, not too soon
after the first, has it free its shared memory and go."""
_LAST_LINES = 5
_LAST_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Record:
    """How a run ended."""

    key: str
    wall_s: float
    """Of the whole process."""
    commit: str | None
    """Of the library's source; None where it is no checkout."""
    error: str | None = None
    """Why it failed; None where it did not."""


def record_of(run: PlannedRun) -> Record | None:
    """How this very run ended before; None when it was never run to an end, or with other settings."""
    try:
        record = Record(**json.loads((run.folder / _RECORD).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return record if record.key == run.key else None


def is_finished(run: PlannedRun) -> bool:
    """Whether there is nothing to do: a run that failed is done again."""
    record = record_of(run)
    return record is not None and record.error is None


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
        tasks = {asyncio.create_task(one(run), name=str(run)) for run in wave}
        try:
            while tasks:
                ended, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    yield task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _run(run: PlannedRun, *, timeout_s: float, keep_models: bool) -> Record:
    """One child, from its configuration to its record. What an earlier try left is removed."""
    shutil.rmtree(run.folder, ignore_errors=True)
    files = run.folder.parent.parent
    for folder in ("configs", "logs"):
        (files / folder).mkdir(parents=True, exist_ok=True)
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
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / _RECORD).write_text(json.dumps(asdict(record), indent=1) + "\n", encoding="utf-8")
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
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


def _tail(log: Path) -> str:
    """The last lines of what the run said."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
        lines = [line for line in file.read().decode("utf-8", errors="replace").splitlines() if line.strip()]
    return "\n".join(lines[-_LAST_LINES:]) or "it said nothing"
