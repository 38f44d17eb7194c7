"""Pictures of an ablation: the curve over steps, each number over an axis. matplotlib is imported when one is drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.ablate.config import CURVES, Ablation, picture_of
from asyncrl.ablate.grid import Point, points_of
from asyncrl.ablate.report import Ended, outcomes_of
from asyncrl.ablate.statistics import Estimate, Outcomes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_COLUMNS = 3
_MARKERS = "osD^vPX*"


def draw(folder: Path, ablation: Ablation, ended: Ended) -> list[Path]:
    """Write `curves.png` and a picture for each number of the report that any run has. Returns their places."""
    pictures = [_draw_curves(folder / f"{CURVES}.png", ablation, ended)]
    outcomes = outcomes_of(ablation, ended)
    for report in ablation.report:
        if any(outcomes.estimate(point, report) for point in points_of(ablation)):
            pictures.append(_draw_report(folder / f"{picture_of(report)}.png", ablation, outcomes, report=report))
    return pictures


def _draw_curves(path: Path, ablation: Ablation, ended: Ended) -> Path:
    """A panel for each point of the axis `over`, a line for each combination of the others, with a band of one standard error."""
    from matplotlib.figure import Figure

    labels, lines = ablation.labels(ablation.across), _lines(ablation)
    columns = min(_MOST_COLUMNS, len(labels))
    rows = math.ceil(len(labels) / columns)
    figure = Figure(figsize=(1 + 3.6 * columns, 0.6 + 2.9 * rows), dpi=120, layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for panel, label in zip(panels, labels, strict=False):
        for number, line in enumerate(lines):
            point = {**line, ablation.across: label}
            runs = [measured.curves[ablation.curve] for run, record, measured in ended
                    if record.error is None and dict(run.point) == point and measured.curves[ablation.curve].steps]
            _draw_curve(panel, [dict(zip(run.steps, run.values, strict=True)) for run in runs], number=number, name=_name(line))
        panel.set(title=_plain(f"{ablation.across} {label}"), ylabel=_plain(ablation.curve))
        panel.label_outer()
        panel.grid(alpha=0.25)
    for panel in panels[len(labels):]:
        panel.set_visible(False)
    for panel in panels[max(0, len(labels) - columns):len(labels)]:  # the lowest of each column
        panel.set_xlabel("step")
        panel.tick_params(labelbottom=True)
    if any(map(_name, lines)):
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=min(4, len(lines)), fontsize="small")
    figure.savefig(path)
    return path


def _draw_curve(panel: Axes, runs: Sequence[Mapping[int, float]], *, number: int, name: str) -> None:
    steps = sorted({step for run in runs for step in run})
    estimates = [Estimate.of([run[step] for run in runs if step in run]) for step in steps]
    means = [one.mean for one in estimates if one]
    errors = [one.standard_error or 0.0 for one in estimates if one]
    panel.plot(steps, means, color=f"C{number}", linewidth=1.4, label=name or None)
    if any(errors):
        bounds = ([mean + sign * error for mean, error in zip(means, errors, strict=True)] for sign in (-1, 1))
        panel.fill_between(steps, *bounds, color=f"C{number}", alpha=0.18, linewidth=0)


def _draw_report(path: Path, ablation: Ablation, outcomes: Outcomes, *, report: str) -> Path:
    """The points of the axis `over` at equal distances, a line for each combination of the others, bars of one standard error."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=120, layout="constrained")
    axes = figure.subplots()
    labels, lines = ablation.labels(ablation.across), _lines(ablation)
    for number, line in enumerate(lines):
        found = [(place, estimate) for place, label in enumerate(labels)
                 if (estimate := outcomes.estimate({**line, ablation.across: label}, report)) is not None]
        offset = 0.06 * (number - (len(lines) - 1) / 2)  # bars beside one another stay readable
        axes.errorbar([place + offset for place, _ in found], [one.mean for _, one in found],
                      yerr=[one.standard_error or 0.0 for _, one in found], color=f"C{number}", marker=_MARKERS[number % len(_MARKERS)],
                      markersize=5, capsize=3, linewidth=1.4, label=_name(line) or None)
    axes.set_xticks(range(len(labels)), [_plain(label) for label in labels])
    asked = ablation.report[report]
    steps = f", last {asked.last_steps} steps" if asked.last_steps else ""
    axes.set(xlabel=_plain(ablation.across), ylabel=_plain(f"{asked.metric}\n{asked.stat}{steps}"),
             title=_plain(f"{report}: {ablation.recipe}, {ablation.steps} steps, seeds {len(ablation.seeds)}, ± s.e."))
    axes.set_yscale(asked.scale)
    axes.grid(alpha=0.25)
    if any(map(_name, lines)):
        axes.legend(fontsize="small")
    figure.savefig(path)
    return path


def _lines(ablation: Ablation) -> list[dict[str, Any]]:
    return [dict(point) for point in points_of(ablation, among=[axis for axis in ablation.axes if axis != ablation.across])]


def _name(line: Point) -> str:
    name = ", ".join(line.values()) if len(line) == 1 else ", ".join(f"{axis} {label}" for axis, label in line.items())
    return _plain(f" {name}" if name.startswith("_") else name)  # legends leave out what begins so


def _plain(text: str) -> str:
    """Text of the user's as it stands: between two dollars matplotlib would read a formula."""
    return text.replace("$", r"\$")
