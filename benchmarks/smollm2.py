"""RL on a real model: SmolLM2-135M-Instruct learns to answer sums in the form it is shown. `python benchmarks/smollm2.py`

Runs recipes/smollm2/sums.yaml, or reads the folder of a run that is over (`--run runs/smollm2`). Writes results/smollm2.json and
docs/smollm2.png: the reward of each step by part, staleness and mismatch, the share of weights that was sent, seconds and tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from machine import ROOT, commit, machine
from matplotlib.figure import Figure

from asyncrl.observe.jsonl import iterate_jsonl

RECIPE = "recipes/smollm2/sums.yaml"
RESULT = ROOT / "benchmarks" / "results" / "smollm2.json"
PICTURE = ROOT / "docs" / "smollm2.png"
TIMEOUT_S = 3600
EDGE_STEPS = 3
"""First and last values are means over so many steps: one batch of 64 rollouts is a noisy measure. The first hold some learning."""
CURVES = {"form": "reward/function.form/mean", "sum": "reward/function.sum/mean"}
PER_STEP = ("staleness/token/max", "correction/logprob_gap/mean", "correction/logprob_gap_staleness_0/mean", "correction/ess/frac",
            "weights/density/mean", "weights/sync_s/mean", "rollout/tokens/sum", "rollout/truncated_frac/mean", "train/period_s/last",
            "trainer/wait_frac/last", "engine/wait_frac/last", "train/grad_norm/last", "buffer/zero_variance/frac")


def run_recipe(folder: Path, overrides: Sequence[str]) -> Path:
    """Run the recipe in a process of its own; gives the folder of the run. Its console is shown as it comes."""
    command = [sys.executable, "-m", "asyncrl.cli", "train", RECIPE, f"run.folder={folder}", "run.name=smollm2", *overrides]
    if subprocess.run(command, cwd=ROOT, timeout=TIMEOUT_S, check=False).returncode:
        raise SystemExit("the run failed; its own lines are above")
    return folder / "smollm2"


def summarise(folder: Path) -> dict[str, Any]:
    """What a finished run says of itself. Raises SystemExit for one that ended early."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    if "ended_early" in summary:
        raise SystemExit(f"{folder} ended early: {summary['ended_early']}")
    rows = [row for row in iterate_jsonl(folder / "metrics.jsonl") if "step" in row]
    curves = {part: [round(row[name], 4) for row in rows] for part, name in CURVES.items()}
    edges = {part: {"first": statistics.mean(values[:EDGE_STEPS]), "last": statistics.mean(values[-EDGE_STEPS:])}
             for part, values in curves.items()}
    settings = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8").replace(f"{ROOT}/", ""))
    del settings["run"]["folder"]  # of this machine
    return {"settings": settings, "summary": summary,
            "steps": [int(row["step"]) for row in rows], "curves": curves, "edges": edges,
            "per_step": {name: [row.get(name) for row in rows] for name in PER_STEP}}


def draw(result: Mapping[str, Any]) -> Figure:
    """The share of rollouts that earned each part, step by step."""
    figure = Figure(figsize=(7.5, 4), dpi=120, layout="constrained")
    axes = figure.subplots()
    for part, label, colour in (("form", "ends in the form asked for", "#2a6f97"), ("sum", "the sum is right", "#d62828")):
        axes.plot(result["steps"], result["curves"][part], "-o", markersize=3, linewidth=1.5, label=label, color=colour)
    buffer = result["settings"]["buffer"]
    rollouts = buffer["groups_per_step"] * buffer["group_size"]
    axes.set(xlabel=f"step ({rollouts} rollouts trained)", ylabel="share of rollouts", ylim=(0, 1.02),
             title=f"SmolLM2-135M-Instruct, two CPU cores, {result['summary']['wall_s'] / 60:.0f} minutes")
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right")
    return figure


def main() -> None:
    """Run or read, write the JSON and the picture, print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, help="folder of a finished run; left out, the recipe is run")
    parser.add_argument("--set", nargs="*", default=[], help="overrides for the run, section.key=value")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    parser.add_argument("--note", default="", help="kept in the JSON: what else the machine was doing")
    options = parser.parse_args()
    at = commit()
    with tempfile.TemporaryDirectory() as folder:
        measured = summarise(options.run or run_recipe(Path(folder), options.set))
    result = {"benchmark": "smollm2", "model": "SmolLM2-135M-Instruct, from 4-bit GGUF to float32", "commit": at, "machine": machine(),
              "note": options.note, **measured}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    draw(result).savefig(options.picture)
    print(json.dumps({"edges": result["edges"], "summary": result["summary"]}, indent=1))


if __name__ == "__main__":
    main()
