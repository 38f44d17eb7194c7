"""`asyncrl ablate`: read, plan, run what is missing, write what was found after each run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from asyncrl.ablate.config import Ablation, load_ablation
from asyncrl.ablate.folder import RESULTS, TABLE, claimed, require_folder, require_own_results
from asyncrl.ablate.grid import PlannedRun, plan, points_of, told
from asyncrl.ablate.measure import DamagedRows, Measured, known_metrics, measure
from asyncrl.ablate.plots import draw
from asyncrl.ablate.report import results, write_results, write_table
from asyncrl.ablate.runs import Record, is_damaged, record_of, run_all
from asyncrl.errors import ConfigError, RunAborted
from asyncrl.interrupts import Interrupted, run_interruptibly
from asyncrl.settings import nearest

DEFAULT_FOLDER = "runs/ablations"
"""Where the folder of an ablation lies unless one is named."""
_ENDING = "ending the runs under way; what has ended is kept. Once more ends it at once"


@dataclass(frozen=True, slots=True)
class Plan:
    """An ablation as it will be run."""

    ablation: Ablation
    runs: list[PlannedRun]
    folder: Path
    name: str
    profile: str
    jobs: int
    """Runs at once."""


def read_plan(file: str | Path, *, out: str | Path | None, quick: bool, jobs: int = 1) -> Plan:
    """Everything that can be wrong is found here, before anything starts. Raises ConfigError."""
    if jobs < 1:
        raise ConfigError("--jobs", value=jobs, allowed="an integer of at least 1", remedy="1 runs one after the other.")
    whole, path = load_ablation(file)
    ablation, profile = whole.of_profile(quick=quick), "quick" if quick else "full"
    folder = Path(out) if out is not None else Path(DEFAULT_FOLDER) / (f"{path.stem}-quick" if quick else path.stem)
    require_folder(folder)
    require_own_results(folder, ablation, name=path.stem, profile=profile)
    return Plan(ablation, plan(ablation, file=path, folder=folder), folder, path.stem, profile, jobs)


def describe(made: Plan) -> str:
    """The grid, and what is left to do of it."""
    points = points_of(made.ablation)
    lines = [f"{made.name}, profile {made.profile}: {made.ablation.recipe}, {made.ablation.steps} steps, {len(points)} points × "
             f"{len(made.ablation.seeds)} seeds"]
    for point in points:
        settings = {key: value for axis, label in point.items() for key, value in made.ablation.axes[axis].settings[label].items()}
        lines.append(f"  {told(point)}: {' '.join(f'{key}={value}' for key, value in settings.items())}")
    ended = _Ended(made)
    lines += [f"warning: {line}" for line in ended.warnings]
    lines.append(f"{len(made.runs)} runs, {len(ended.in_order())} of them finished before; in {made.folder}")
    return "\n".join(lines)


def ablate(made: Plan, *, tell: Callable[[str], None]) -> bool:
    """Run what is missing and write everything there is. Returns whether all runs ended well.

    Raises ConfigError while another process has the folder; Interrupted after Ctrl-C or SIGTERM, with what has ended written;
    RunAborted when the folder goes away meanwhile.
    """
    with claimed(made.folder):
        require_own_results(made.folder, made.ablation, name=made.name, profile=made.profile)
        try:
            return _ablate(made, tell=tell)
        except Interrupted:
            tell("interrupted: runs under way were ended, the others are kept; the same command goes on from here")
            raise
        except (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
            raise RunAborted(f"the folder of the ablation was changed while it ran, or something else is in the way: {error}. "
                             "The same command goes on with what is left") from error


def _ablate(made: Plan, *, tell: Callable[[str], None]) -> bool:
    ended = _Ended(made)
    missing = [run for run in made.runs if run not in ended]
    tell(f"{made.name}: {len(made.runs)} runs, {len(made.runs) - len(missing)} finished before; in {made.folder}")
    for line in ended.warnings:
        tell(f"warning: {line}")
    if missing:
        run_interruptibly(_run_missing(made, missing, ended=ended, tell=tell), said=_ENDING)
    ended.write()
    pictures = draw(made.folder, made.ablation, ended.in_order())
    tell(f"written: {RESULTS}, {TABLE}, {', '.join(path.name for path in pictures)} in {made.folder}")
    return all(record.error is None for _, record, _ in ended.in_order())


async def _run_missing(made: Plan, missing: list[PlannedRun], *, ended: _Ended, tell: Callable[[str], None]) -> None:
    settings = made.ablation
    walls_s: list[float] = []
    async with aclosing(run_all(missing, jobs=made.jobs, timeout_s=settings.timeout_s, keep_models=settings.keep_models)) as outcomes:
        async for run, record in outcomes:
            for warning in ended.add(run, record):
                tell(f"warning: {warning}")
            ended.write()
            walls_s.append(record.wall_s)
            left = len(missing) - len(walls_s)
            left_s = left * sum(walls_s) / len(walls_s) / made.jobs
            tell(f"[{len(walls_s)}/{len(missing)}] {run}: {ended.line(run)}, {record.wall_s:.0f} s"
                 + (f"; about {left_s / 60:.0f} min left" if left else ""))


class _Ended:
    """The runs that have ended, measured once each, and what is written of them."""

    def __init__(self, made: Plan) -> None:
        """With the runs that were finished before; `warnings` says which of them cannot be kept, and what they do not have."""
        self._made = made
        self._found: dict[str, tuple[PlannedRun, Record, Measured]] = {}
        self.warnings: list[str] = []
        for run in made.runs:
            if is_damaged(run):
                self._give_up(run, f"what lies in {run.folder} is no run, or its ablation.json is damaged")
            elif (record := record_of(run)) is not None and record.error is None:
                self._keep(run, record)

    def __contains__(self, run: PlannedRun) -> bool:
        return run.key in self._found

    def _keep(self, run: PlannedRun, record: Record) -> None:
        try:
            measured = self._measured(run)
        except DamagedRows as error:
            self._give_up(run, str(error))
            return
        if not measured.steps:
            self._give_up(run, "metrics.jsonl has no step")
            return
        self.warnings += self._lacks(run, measured)
        self._found[run.key] = (run, record, measured)

    def _give_up(self, run: PlannedRun, why: str) -> None:
        self.warnings.append(f"{run}: {why}; it is run again")

    def add(self, run: PlannedRun, record: Record) -> list[str]:
        """Measure a run that has just ended; one whose rows are damaged has failed.

        Gives a warning for each metric that none of its rows has, with the nearest that one has, of the first that ends well.
        """
        try:
            measured = self._measured(run)
        except DamagedRows as error:
            record = record.model_copy(update={"error": record.error or str(error)})
            measured = Measured(0, {}, {})
        warnings = self._lacks(run, measured) if record.error is None else []
        self._found[run.key] = (run, record, measured)
        return warnings

    def _lacks(self, run: PlannedRun, measured: Measured) -> list[str]:
        if any(record.error is None for _, record, _ in self._found.values()):
            return []
        names = known_metrics(run.folder)
        return [f"{run} has no metric {metric}. {nearest(metric, names)}".rstrip()
                for metric, curve in measured.curves.items() if not curve.steps]

    def _measured(self, run: PlannedRun) -> Measured:
        return measure(run.folder, report=self._made.ablation.report, curve=self._made.ablation.curve)

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
        write_results(made.folder / RESULTS, results(made.ablation, self.in_order(), name=made.name, profile=made.profile))
        write_table(made.folder / TABLE, made.ablation, self.in_order(), name=made.name)
