"""The presets as text: a table of all, a page on one. No torch."""

from __future__ import annotations

from asyncrl.correction.formula import formula, kept_text, weight_text
from asyncrl.correction.preset_spec import Preset
from asyncrl.correction.presets import preset, presets
from asyncrl.correction_cli.tables import aligned
from asyncrl.observe.figures import wrapped

_WIDTH = 110
_PROXIMAL = {"recompute": "recompute: a forward pass before the first update, left out where it changes nothing",
             "log_linear": "log-linear: between rollout and current logprobs by version, no pass"}


def preset_table() -> str:
    """One line a preset: weight, what is kept, loss, origin."""
    rows = [(known.name, weight_text(known), kept_text(known), known.loss, known.origin) for known in map(preset, presets())]
    return aligned([("preset", "weight", "kept", "loss", "origin"), *rows])


def preset_markdown() -> str:
    """The table of docs/correction.md."""
    rows = [(f"`{known.name}`", weight_text(known), kept_text(known), "before correction" if known.denominator == "original" else "kept",
             f"`{known.loss}`") for known in map(preset, presets())]
    head = ("preset", "weight of a kept token", "kept", "divided by tokens", "loss")
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows)])


def preset_page(known: Preset) -> str:
    """All there is to say about one preset."""
    settings = ", ".join(f"{name}={value:g}" for name, value in known.loss_settings)
    first, *rest = formula(known)
    lines = [("preset", known.name), ("formula", first), *(("", line) for line in rest),
             ("proximal", _PROXIMAL[known.proximal]), ("loss", f"{known.loss}({settings}), {known.aggregation}"),
             ("origin", known.origin), *([("paper", known.paper)] if known.paper else []), ("departs", known.departs),
             ("evidence", "; ".join(known.evidence))]
    return "\n".join(line for label, text in lines for line in wrapped(f"{label:10}{text}", _WIDTH, indent=" " * 10))
