"""Pictures of a run. matplotlib is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def plot_reward(path: Path, *, steps: Sequence[int], rewards: Sequence[float], evaluations: Mapping[int, float], title: str) -> None:
    """Write a PNG of the mean reward of each step's rollouts, with the evaluations as points."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, rewards, color="#2a6f97", linewidth=1.6, label="rollouts, mean of the step")
    if evaluations:
        axes.plot(list(evaluations), list(evaluations.values()), "o", color="#d62828", label="held-out prompts")
    axes.set(xlabel="step", ylabel="mean reward", title=title)
    shown = [*rewards, *evaluations.values()]
    if all(0 <= reward <= 1 for reward in shown):
        axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right")
    figure.savefig(path)


def plot_waterfall(path: Path, *, sides: Mapping[str, Mapping[str, float]], title: str) -> None:
    """Write a PNG of shares of time, a panel for each side: every bar begins where the one before ends, the last ends at 1."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), dpi=120, layout="constrained")
    for axes, (side, shares) in zip(figure.subplots(1, len(sides), squeeze=False)[0], sides.items(), strict=True):
        begun = 0.0
        for cause, share in shares.items():
            axes.bar(cause, share, bottom=begun, color="#2a6f97")
            axes.annotate(f"{share:.0%}", (cause, begun + share), ha="center", va="bottom", fontsize=8)
            begun += share
        axes.set(title=f"{title}: {side}", ylabel="share of its seconds", ylim=(0, 1.08))
        axes.tick_params(axis="x", rotation=45)
        axes.grid(axis="y", alpha=0.25)
    figure.savefig(path)
