"""`asyncrl plan`: tables, JSON, pictures, or a recipe."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from asyncrl.plan.advise import advise
from asyncrl.plan.options import setup_of
from asyncrl.plan.report import as_json, as_text
from asyncrl.plan.step import plan_step


def run(options: argparse.Namespace) -> str:
    """What is printed. Writes pictures and the recipe where they were asked for. Raises ConfigError for a plan that cannot be."""
    setup = setup_of(options)
    advice = advise(setup) if options.advise else None
    plan = advice.plan if advice else plan_step(setup)
    notes: list[str] = []
    if advice:
        from asyncrl.plan.recipe import BASE, write_recipe

        base = options.recipe or BASE
        notes = ["", *advice.steps, "", f"{options.advise}: the batch, updates, staleness and ranks of this plan; model, task and sampling "
                 f"are those of {base}. Start it with `asyncrl train {options.advise}`."]
        write_recipe(Path(options.advise), plan, base=base, notes=[*advice.steps, "", f"Model, task and sampling: {base}."])
    if options.plot:
        from asyncrl.plan.picture import plot_plan

        notes += [f"wrote {path}" for path in plot_plan(Path(options.plot), plan)]
    if options.json:
        return json.dumps(as_json(plan) | ({"advice": list(advice.steps)} if advice else {}), indent=2, allow_nan=False)
    return "\n".join([as_text(plan), *notes])
