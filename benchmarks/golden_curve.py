"""Fifty steps of the quickstart's model and prompts, untrained, seeded and deterministic.

`python -m benchmarks.golden_curve` writes results/trainer/golden_curve.json; `--only RUN` one of its runs alone, `curve` first.

The inline engine samples, every batch is one step old, torch is held to algorithms that give the same bits, so a run on one machine repeats
to the bit. On another one sums are rounded in another order: a logprob moves in its seventh digit, and sooner or later a token whose draw
lay on the edge may come out differently, and with it a reward. A change of what a step computes moves the first steps at once. The test
therefore compares these, and closely: how closely, two more runs say, one with two threads and one without vector instructions.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.observe.jsonl import iterate_jsonl
from asyncrl.types import Prompt
from benchmarks.machine import ROOT, commit, machine

RESULT = ROOT / "benchmarks" / "results" / "trainer" / "golden_curve.json"
STEPS, COMPARED_STEPS = 50, 4
COLUMNS = {"reward": "reward/total/mean", "loss": "train/loss/mean", "grad_norm": "train/grad_norm/last", "entropy": "train/entropy/mean",
           "kl": "correction/kl_k3/mean"}
TOLERANCES = {"reward": 1e-6, "loss": 6e-5, "grad_norm": 3e-5, "entropy": 1e-6, "kl": 2e-4}
"""Largest gaps of the compared steps, in shares of a column's largest value: a hundred times what was measured between the runs below,
or more, and a fortieth of what 1.01 times the learning rate does to loss, gradient and KL, or less."""
SETTINGS = ["run.deterministic=true", "buffer.policy={kind: fixed_lag, lag_steps: 1}", "buffer.max_staleness=1",
            "weights.interruption=drain", "eval={kind: none}",
            "trainer.processes=0", "trainer.checkpoint_every_steps=null", "warm_up={kind: none}",
            "env.reward=benchmarks/golden_curve.py:sevens"]
TIMEOUT_S = 580


@dataclass(frozen=True, slots=True)
class Rounding:
    """What rounds sums otherwise, and changes nothing else."""

    threads: int = 1
    environment: dict[str, str] = field(default_factory=dict)


OTHERS = {"two_threads": Rounding(threads=2), "plain_instructions": Rounding(environment={"ATEN_CPU_CAPABILITY": "default"})}


def sevens(prompt: Prompt, completion: str) -> float:
    """The share of sevens in an answer: something an untrained model learns in fifty steps."""
    return completion.count("7") / max(1, len(completion))


def curve(steps: int, *, folder: Path, name: str = "golden", rounding: Rounding = Rounding(),
          settings: tuple[str, ...] = ()) -> list[dict[str, float]]:
    """What each step recorded, in a process of its own. Runs of one folder share the model."""
    command = [sys.executable, "-m", "asyncrl.cli", "train", str(ROOT / "recipes" / "arithmetic" / "quickstart.yaml"), *SETTINGS,
               f"engine={{kind: inline, threads: {rounding.threads}}}", f"trainer.threads={rounding.threads}",
               f"run.steps={steps}", f"run.folder={folder}", f"run.name={name}", *settings]
    # Threads that wait do not keep a core from those that work.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(rounding.threads), "OMP_WAIT_POLICY": "passive",
                   **rounding.environment}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise SystemExit(f"the run failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    rows = [row for row in iterate_jsonl(folder / name / "metrics.jsonl") if "train/loss/mean" in row]
    return [{column: row[metric] for column, metric in COLUMNS.items()} for row in rows]


def largest_gaps(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> dict[str, float]:
    """By column, the largest difference of a step in shares of the column's largest value."""
    return {column: max(abs(mine[column] - other[column]) for mine, other in zip(ours, theirs, strict=True))
            / max(abs(other[column]) for other in theirs) for column in COLUMNS}


def record(name: str) -> None:
    """One run, into the result: the curve, or how far another rounding takes it from there. A curve that has not changed keeps those."""
    with tempfile.TemporaryDirectory() as folder:
        rows = curve(STEPS, folder=Path(folder), rounding=OTHERS.get(name, Rounding()))
    before: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
    if name == "curve":
        result = {"benchmark": "trainer/golden_curve", "machine": machine(), "commit": commit(),
                  "gaps": before["gaps"] if before.get("curve") == rows else {}, "curve": rows}
    else:
        result = before
        result["gaps"][name] = {str(steps): largest_gaps(rows[:steps], result["curve"][:steps]) for steps in (COMPARED_STEPS, STEPS)}
        print(name, json.dumps(result["gaps"][name], indent=1))
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Record the curve, and how far runs that round otherwise are from it, as on another machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("curve", *OTHERS))
    only = parser.parse_args().only
    for name in (only,) if only else ("curve", *OTHERS):
        record(name)


if __name__ == "__main__":
    main()
