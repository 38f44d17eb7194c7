"""The quickstart over several seeds: reward before and after, seconds of warm-up and of RL. `python benchmarks/quickstart.py`

Every seed has a warm-up, prompts and engine of its own, and is run with the embedded engine and, from the same warm model, with vLLM.
Writes results/quickstart.json and docs/reward.png, which shows the embedded engine's.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import ROOT, commit, machine
from matplotlib.figure import Figure

from asyncrl.observe.jsonl import iterate_jsonl
from asyncrl.observe.summary import reward_curve

RESULT = ROOT / "benchmarks" / "results" / "quickstart.json"
PICTURE = ROOT / "docs" / "reward.png"
TIMEOUT_S = 900


def run_seed(recipe: str, seed: int, *, folder: Path, overrides: list[str]) -> dict[str, Any]:
    """One whole run in a process of its own, warm-up included unless `folder` has it already."""
    name = f"{recipe}-{seed}"
    settings = [f"run.name={name}", f"run.folder={folder}", f"run.seed={seed}", f"engine.seed={seed}", f"warm_up.seed={seed}",
                f"prompts.arguments.seed={seed}", *overrides]
    done = subprocess.run([sys.executable, "-m", "asyncrl.cli", "train", f"recipes/arithmetic/{recipe}.yaml", *settings], cwd=ROOT,
                          capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    prepared = re.search(r"prepared in (\d+) s", done.stdout)
    steps, rewards = reward_curve([row for row in iterate_jsonl(folder / name / "metrics.jsonl") if "step" in row])
    return {"seed": seed, "warm_up_s": int(prepared.group(1)) if prepared else None,
            "summary": json.loads((folder / name / "summary.json").read_text()), "steps": steps,
            "rewards": [round(reward, 4) for reward in rewards]}


def main() -> None:
    """Run, write the JSON and the picture, print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", nargs="*", default=[], help="overrides for every seed, section.key=value")
    options = parser.parse_args()
    at = commit()
    with tempfile.TemporaryDirectory() as folder:
        pairs = [[run_seed(recipe, seed, folder=Path(folder), overrides=options.set) for recipe in ("quickstart", "vllm")]
                 for seed in options.seeds]
    runs, vllm_runs = map(list, zip(*pairs, strict=True))
    result = {"benchmark": "quickstart", "commit": at, "machine": machine(), "overrides": options.set, **figures(runs),
              "vllm": figures(vllm_runs)}
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    draw(runs).savefig(PICTURE)
    print(json.dumps([{key: value for key, value in part.items() if key not in ("runs", "machine", "vllm")}
                      for part in (result, result["vllm"])], indent=1))


def figures(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What the runs of one engine come to."""
    walls = [run["summary"]["wall_s"] for run in runs]
    return {"rl_wall_s": {"median": statistics.median(walls), "worst": max(walls)},
            "reward_first_most": max(run["summary"]["reward_first"] for run in runs),
            "reward_last_least": min(run["summary"]["reward_last"] for run in runs), "runs": runs}


def draw(runs: list[dict[str, Any]]) -> Figure:
    """One line a seed, with the held-out reward before and after."""
    figure = Figure(figsize=(7.5, 4), dpi=120, layout="constrained")
    axes = figure.subplots()
    for run in runs:
        (line,) = axes.plot(run["steps"], run["rewards"], linewidth=1.4, label=f"seed {run['seed']}, {run['summary']['wall_s']:.0f} s")
        axes.plot([0, run["steps"][-1]], [run["summary"]["eval_before"], run["summary"]["eval_after"]], "o", color=line.get_color(),
                  markersize=5)
    axes.set(xlabel="step (512 rollouts)", ylabel="mean reward", ylim=(0, 1),
             title="asyncrl quickstart, two CPU cores (dots: held-out sums)")
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right")
    return figure


if __name__ == "__main__":
    main()
