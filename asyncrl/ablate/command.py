"""`asyncrl ablate`: read, plan, run what is missing, write what was found after each run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from asyncrl.ablate.config import Ablation, load_ablation
from asyncrl.ablate.grid import PlannedRun, plan, points_of, told
from asyncrl.ablate.measure import Measured, known_metrics, measure
from asyncrl.ablate.plots import draw
from asyncrl.ablate.report import results, write_results, write_table
from asyncrl.ablate.runs import Record, is_finished, record_of, run_all
from asyncrl.errors import ConfigError
from asyncrl.paths import claim
from asyncrl.settings import nearest

DEFAULT_FOLDER = "runs/ablations"
"""Where the folder of an ablation lies unless one is named."""


@dataclass(frozen=True, slots=True)
class Plan:
    """An ablation as it will be run."""

    ablation: Ablation
    runs: list[PlannedRun]
    folder: Path
    name: str
    profile: str


def read_plan(file: str | Path, *, out: str | Path | None, quick: bool) -> Plan:
    """Everything that can be wrong is found here, before anything starts. Raises ConfigError."""
    whole, path = load_ablation(file)
    ablation, profile = whole.of_profile(quick=quick), "quick" if quick else "full"
    folder = Path(out) if out is not None else Path(DEFAULT_FOLDER) / (f"{path.stem}-quick" if quick else path.stem)
    return Plan(ablation, plan(ablation, file=path, folder=folder), folder, path.stem, profile)


def describe(made: Plan) -> str:
    """The grid, and what is left to do of it."""
    points = points_of(made.ablation)
    lines = [f"{made.name}, profile {made.profile}: {made.ablation.recipe}, {made.ablation.steps} steps, {len(points)} points × "
             f"{len(made.ablation.seeds)} seeds"]
    for point in points:
        settings = {key: value for axis, label in point.items() for key, value in made.ablation.axes[axis].settings[label].items()}
        lines.append(f"  {told(point)}: {' '.join(f'{key}={value}' for key, value in settings.items())}")
    kept = sum(map(is_finished, made.runs))
    lines.append(f"{len(made.runs)} runs, {kept} of them finished before; in {made.folder}")
    return "\n".join(lines)


def ablate(made: Plan, *, jobs: int, tell: Callable[[str], None]) -> bool:
    """Run what is missing and write everything there is. Returns whether all runs ended well.

    Raises ConfigError while another process has the folder; KeyboardInterrupt when interrupted, with what has ended written.
    """
    if jobs < 1:
        raise ConfigError("--jobs", value=jobs, allowed="an integer of at least 1", remedy="1 runs one after the other.")
    made.folder.mkdir(parents=True, exist_ok=True)
    with _claimed(made.folder):
        missing = [run for run in made.runs if not is_finished(run)]
        tell(f"{made.name}: {len(made.runs)} runs, {len(made.runs) - len(missing)} finished before; in {made.folder}")
        ended = _Ended(made, tell)
        try:
            asyncio.run(_run_missing(made, missing, jobs=jobs, ended=ended, tell=tell))
        except KeyboardInterrupt:
            tell("interrupted: runs under way were ended, the others are kept; the same command goes on from here")
            raise
        ended.write()
        pictures = draw(made.folder, made.ablation, ended.in_order())
        tell(f"written: results.json, table.md, {', '.join(path.name for path in pictures)} in {made.folder}")
        return all(record.error is None for _, record, _ in ended.in_order())


async def _run_missing(made: Plan, missing: list[PlannedRun], *, jobs: int, ended: _Ended, tell: Callable[[str], None]) -> None:
    settings = made.ablation
    walls_s: list[float] = []
    async with aclosing(run_all(missing, jobs=jobs, timeout_s=settings.timeout_s, keep_models=settings.keep_models)) as outcomes:
        async for run, record in outcomes:
            ended.add(run, record)
            ended.write()
            walls_s.append(record.wall_s)
            left = len(missing) - len(walls_s)
            left_s = left * sum(walls_s) / len(walls_s) / jobs
            tell(f"[{len(walls_s)}/{len(missing)}] {run}: {ended.line(run)}, {record.wall_s:.0f} s"
                 + (f"; about {left_s / 60:.0f} min left" if left else ""))


class _Ended:
    """The runs that have ended, measured once each, and what is written of them."""

    def __init__(self, made: Plan, tell: Callable[[str], None]) -> None:
        self._made, self._tell = made, tell
        self._found: dict[str, tuple[PlannedRun, Record, Measured]] = {}
        for run in made.runs:
            if (record := record_of(run)) is not None and record.error is None:
                self.add(run, record)

    def add(self, run: PlannedRun, record: Record) -> None:
        """Measure a run. A metric that none of its rows has is told of, with the nearest that one has."""
        ablation = self._made.ablation
        measured = measure(run.folder, report=ablation.report, curve=ablation.curve)
        if record.error is None and not self._found:
            names = known_metrics(run.folder)
            for metric, curve in measured.curves.items():
                if not curve.steps:
                    self._tell(f"warning: {run} has no metric {metric}. {nearest(metric, names)}".rstrip())
        self._found[run.key] = (run, record, measured)

    def in_order(self) -> list[tuple[PlannedRun, Record, Measured]]:
        """As they were planned."""
        return [self._found[run.key] for run in self._made.runs if run.key in self._found]

    def line(self, run: PlannedRun) -> str:
        """What came out, in a few words."""
        _, record, measured = self._found[run.key]
        if record.error is not None:
            return f"failed, {record.error.splitlines()[0]}"
        return ", ".join(f"{report} {'-' if value is None else format(value, '.3g')}" for report, value in measured.values.items())

    def write(self) -> None:
        """`results.json` and `table.md`, of what has ended so far."""
        made = self._made
        write_results(made.folder / "results.json", results(made.ablation, self.in_order(), name=made.name, profile=made.profile))
        write_table(made.folder / "table.md", made.ablation, self.in_order(), name=made.name)


@contextlib.contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    try:
        lock = claim(folder.absolute() / "ablation")
    except ConfigError as error:
        raise ConfigError("--out", value=str(folder), allowed="a folder that can be written, and that no other `asyncrl ablate` works in",
                          remedy="Wait for that one, or choose another folder.") from error
    with lock:
        yield
