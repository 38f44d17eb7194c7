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
