"""What is left of an ablation: `results.json` with everything, `table.md` for reading."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from asyncrl.ablate import origin
from asyncrl.ablate.config import Ablation
from asyncrl.ablate.grid import PlannedRun, Point, points_of
from asyncrl.ablate.measure import Measured
from asyncrl.ablate.runs import Record
from asyncrl.ablate.statistics import Estimate, Outcomes

_PIPE = r"\|"
"""A pipe that ends no cell."""

Ended = Sequence[tuple[PlannedRun, Record, Measured]]
"""Every run that has ended, in the order of the plan."""


def outcomes_of(ablation: Ablation, ended: Ended) -> Outcomes:
    """The numbers of the runs that did not fail."""
    outcomes = Outcomes(ablation)
    for run, record, measured in ended:
        if record.error is None:
            outcomes.add(run.point, run.seed, measured.values)
    return outcomes


def results(ablation: Ablation, ended: Ended, *, name: str, profile: str) -> dict[str, Any]:
    """Everything, as plain data: the ablation as it was run, each run with its curves, means and differences."""
    outcomes = outcomes_of(ablation, ended)
    return {
        "ablation": name, "profile": profile, "machine": origin.machine(), "versions": origin.versions(),
        **ablation.model_dump(mode="json", include={"recipe", "steps", "seeds", "seed_keys", "settings", "curve", "report"}),
        "axes": {axis: {label: settings for label, settings in section.settings.items()} for axis, section in ablation.axes.items()},
        "over": ablation.across, "reference": {axis: ablation.reference_of(axis) for axis in ablation.axes},
        "means": [{"point": point, "report": report, **asdict(estimate)} for point in points_of(ablation) for report in ablation.report
                  if (estimate := outcomes.estimate(point, report)) is not None],
        "differences": [{"axis": one.axis, "point": one.point, "reference": one.reference, "report": one.report, **asdict(one.estimate)}
                        for axis in ablation.axes for report in ablation.report for one in outcomes.differences(report, axis=axis)],
        "runs": [_run(*one) for one in ended],
    }


def write_results(path: Path, tree: Mapping[str, Any]) -> None:
    """As a whole or not at all: a line for each run and each mean, so that two files can be compared."""
    long = ("means", "differences", "runs")
    head = json.dumps({key: value for key, value in tree.items() if key not in long}, indent=1, allow_nan=False)
    parts = [f' "{key}": [\n' + ",\n".join(f"  {json.dumps(row, allow_nan=False)}" for row in tree[key]) + "\n ]" for key in long]
    _write(path, ",\n".join([head.removesuffix("\n}"), *parts]) + "\n}\n")


def write_table(path: Path, ablation: Ablation, ended: Ended, *, name: str) -> None:
    """Markdown: a table for each number of the report, then the differences of the first, axis by axis."""
    outcomes = outcomes_of(ablation, ended)
    seeds = ", ".join(map(str, ablation.seeds))
    commits = ", ".join(sorted({record.commit for _, record, _ in ended if record.commit})) or "unknown"
    lines = [f"# {name}", "", f"{ablation.recipe}, {ablation.steps} steps, seeds {seeds}; commit {commits}. "
             "Mean ± standard error over seeds; (n) where fewer ended well.", ""]
    for report in ablation.report:
        lines += [f"## {report}", "", *_grid(ablation, functools.partial(outcomes.estimate, report=report)), ""]
    for axis in ablation.axes:
        lines += _differences(ablation, outcomes, axis=axis)
    failed = [f"- {run}: {' '.join(str(record.error).split())}" for run, record, _ in ended if record.error is not None]
    if failed:
        lines += ["## Failed", "", *failed, ""]
    _write(path, "\n".join(lines[:-1]) + "\n")


def _differences(ablation: Ablation, outcomes: Outcomes, *, axis: str) -> list[str]:
    """Of the leading number, of this axis's points to its reference."""
    leading, reference = next(iter(ablation.report)), ablation.reference_of(axis)
    if not outcomes.differences(leading, axis=axis):
        return []
    return [f"## {leading}: difference to {axis} {reference}", "",
            *_grid(ablation, functools.partial(outcomes.difference, report=leading, axis=axis), without=(axis, reference)), ""]


def _grid(ablation: Ablation, cell: Callable[[Point], Estimate | None], *, without: tuple[str, str] | None = None) -> list[str]:
    """The axis `over` from left to right, a row for each combination of the others."""
    across, most = ablation.across, len(ablation.seeds)
    columns = [label for label in ablation.labels(across) if (across, label) != without]
    others = [axis for axis in ablation.axes if axis != across]
    head = [*others, *(f"{across} {label}" for label in columns)]
    rows = [_row(head), _row(["---"] * len(head))]
    for point in points_of(ablation, among=others):
        if without not in point.items():
            cells = (cell({**point, across: label}) for label in columns)
            rows.append(_row([*point.values(), *(_shown(estimate, most=most) for estimate in cells)]))
    return rows


def _shown(estimate: Estimate | None, *, most: int) -> str:
    if estimate is None:
        return "-"
    error = "" if estimate.standard_error is None else f" ± {estimate.standard_error:.2g}"
    return f"{estimate.mean:.3g}{error}" + (f" ({estimate.seeds})" if estimate.seeds < most else "")


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', _PIPE) for cell in cells)} |"


def _run(run: PlannedRun, record: Record, measured: Measured) -> dict[str, Any]:
    curves = {name: asdict(curve) for name, curve in measured.curves.items()}
    return {"point": run.point, "seed": run.seed,
            **record.model_dump(), "steps": measured.steps, "values": measured.values, "curves": curves}


def _write(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
