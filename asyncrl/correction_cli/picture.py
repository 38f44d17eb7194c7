"""A trial as a picture. matplotlib is imported when it is drawn."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.correction.buckets import EXACT_BUCKETS
from asyncrl.correction_cli.trial import Share, Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FATES = (("kept", "#2a6f97"), ("truncated", "#89c2d9"), ("masked", "#f4a261"), ("rejected", "#d62828"))
_TITLE = 100
"""Letters in the width of the figure."""


def plot_trial(path: Path, trial: Trial, *, title: str) -> None:
    """Write stacked shares of kept, truncated, masked and rejected tokens, by staleness and by length; the title may be any text."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), dpi=120, layout="constrained")
    ages, lengths = figure.subplots(1, 2, sharey=True)
    _bars(ages, {age_label(age): share for age, share in trial.by_staleness.items()})
    _bars(lengths, {length_label(bucket): share for bucket, share in trial.by_length.items()})
    ages.set(xlabel="staleness, steps", ylabel="share of loss tokens")
    lengths.set(xlabel="loss tokens of the sequence")
    figure.suptitle(drawable(title), parse_math=False)
    figure.legend(*ages.get_legend_handles_labels(), loc="outside lower center", ncols=len(_FATES), fontsize="small")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # of a name in a script the font lacks: boxes stand for it
        figure.savefig(path)


def drawable(text: str) -> str:
    """On one line that fits, both ends of a long text; what is no character to print is written as its escape."""
    line = "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)
    return line if len(line) <= _TITLE else f"{line[:_TITLE // 2]}…{line[-(_TITLE // 2 - 1):]}"


def age_label(age: int) -> str:
    """Steps, or `9+`."""
    return f"{age}" if age <= EXACT_BUCKETS else f"{age}+"


def length_label(bucket: tuple[int, int]) -> str:
    """First and last length, one number where they are the same."""
    low, high = bucket
    return f"{low}" if low == high else f"{low}-{high}"


def fates(share: Share) -> dict[str, float]:
    """Fractions that add up to 1; kept here is what keeps its own ratio as its weight."""
    counts = {"kept": share.kept - share.truncated, "truncated": share.truncated, "masked": share.masked, "rejected": share.rejected}
    return {name: count / share.tokens for name, count in counts.items()}


def _bars(axes: Axes, shares: dict[str, Share]) -> None:
    below = [0.0] * len(shares)
    for name, color in _FATES:
        heights = [fates(share)[name] for share in shares.values()]
        axes.bar(list(shares), heights, bottom=below, color=color, label=name, width=0.8)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    axes.set_ylim(0, 1)
    axes.tick_params(axis="x", labelrotation=30 if len(shares) > 5 else 0)
