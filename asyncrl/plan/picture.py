"""A plan as pictures: where time goes, the shapes over GPUs and tail, how old data is. matplotlib is imported when they are drawn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.errors import ConfigError
from asyncrl.plan.phases import Setup
from asyncrl.plan.shapes import Jobs, async_gain
from asyncrl.plan.step import StepPlan, plan_step

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = {"colocated": "#2a6f97", "disaggregated": "#89c2d9", "one_step": "#f4a261", "async": "#d62828"}
_SCALES = (0.25, 0.5, 1, 2, 4)
_TAILS = tuple(percent / 100 for percent in range(0, 90, 5))


def plot_plan(folder: Path, plan: StepPlan) -> list[Path]:
    """Write waterfall.png, shapes.png and, where data can be stale, staleness.png; gives their paths.

    Raises ConfigError for a folder that cannot be written.
    """
    from matplotlib.figure import Figure

    drawn = {"waterfall.png": (_waterfall,), "shapes.png": (_over_gpus, _over_tail), "staleness.png": (_staleness,)}
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, draws in drawn.items():
            if name == "staleness.png" and plan.staleness is None:
                continue
            figure = Figure(figsize=(5 * len(draws) + 1, 4), dpi=120, layout="constrained")
            for axes, draw in zip(figure.subplots(1, len(draws), squeeze=False)[0], draws, strict=True):
                draw(axes, plan)
            figure.savefig(folder / name)
            paths.append(folder / name)
    except OSError as error:
        raise ConfigError("plot", value=str(folder), allowed="a folder that can be written", remedy=f"{error}.") from error
    return paths


def _waterfall(axes: Axes, plan: StepPlan) -> None:
    """From 100% down: each bar hangs where the last one ended."""
    left = 1.0
    for cause, share in plan.waterfall.items():
        bottom = 0.0 if cause == "mfu" else left - share
        axes.bar(cause, share, bottom=bottom, color="#2a6f97" if cause == "mfu" else "#89c2d9")
        axes.annotate(f"{share:.1%}", (cause, bottom + share), ha="center", va="bottom", fontsize="small")
        left -= share
    axes.set(ylabel="share of GPU-time, colocated", ylim=(0, 1.08))


def _over_gpus(axes: Axes, plan: StepPlan) -> None:
    """Scales at which something does not fit, or cannot be split, are left out."""
    seen: dict[str, list[tuple[int, float]]] = {}
    for scale in _SCALES:
        gpus = round(plan.setup.placement.gpus * scale)
        for name, seconds in _step_times(plan.setup, gpus).items():
            seen.setdefault(name, []).append((gpus, seconds))
    for name, points in seen.items():
        axes.plot(*zip(*points, strict=True), "o-", color=_COLORS[name], label=name)
    axes.set(xlabel="GPUs", ylabel="step, s", xscale="log", yscale="log")
    axes.legend(fontsize="small")


def _step_times(setup: Setup, gpus: int) -> dict[str, float]:
    try:
        plan = plan_step(replace(setup, placement=replace(setup.placement, gpus=gpus)))
    except ConfigError:
        return {}
    return {name: shape.total_s for name, shape in plan.shapes.items() if shape.obstacle is None}


def _over_tail(axes: Axes, plan: StepPlan) -> None:
    """Colocated over balanced async, by the tail's share of generation; the plan's own is marked."""
    jobs = plan.phases.jobs

    def gain(tail_frac: float) -> float:
        tail_s = jobs.throughput_s * tail_frac / (1.0 - tail_frac)
        return async_gain(Jobs(gpus=jobs.gpus, throughput_s=jobs.throughput_s, tail_s=tail_s, train_s=jobs.train_s))

    own = plan.phases.decode.tail_frac
    axes.plot(_TAILS, [gain(tail) for tail in _TAILS], color=_COLORS["async"])
    axes.plot([own], [gain(own)], "o", color=_COLORS["async"])
    axes.set(xlabel="tail's share of generation", ylabel="colocated / balanced async")


def _staleness(axes: Axes, plan: StepPlan) -> None:
    if plan.staleness is not None:
        ages = range(len(plan.staleness.rollouts))
        axes.bar([age - 0.2 for age in ages], plan.staleness.rollouts, width=0.4, label="rollouts", color="#2a6f97")
        axes.bar([age + 0.2 for age in ages], plan.staleness.tokens, width=0.4, label="tokens", color="#89c2d9")
        axes.set(xlabel="steps behind, of generation alone", ylabel="share", xticks=list(ages))
        axes.legend(fontsize="small")
