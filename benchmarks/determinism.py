"""What `run.deterministic` costs: seconds a step with it over seconds a step without, for K = 0 and for a fixed lag of 1.

`python benchmarks/determinism.py` writes results/determinism.json. The model and the batch are those
of recipes/arithmetic/quickstart.yaml, untrained and judged by a hash, with the engine `inline`; both sides take turns, each run in a
process of its own, and the ratio is the median over pairs of neighbours. Processor seconds are beside it, for a busy machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from machine import ROOT, commit, machine

from asyncrl.config import parse_config
from asyncrl.functions import load_function
from asyncrl.training import build
from asyncrl.types import Prompt

RESULT = ROOT / "benchmarks" / "results" / "determinism.json"
MODEL = {"layers": 4, "hidden": 64, "heads": 2, "intermediate": 128, "initializer_range": 0.06}
SETTINGS = {"K = 0": {"max_staleness": 0}, "fixed_lag 1": {"max_staleness": 1, "policy": {"kind": "fixed_lag", "lag_steps": 1}}}
PAIRS, STEPS, WARM_UP_STEPS = 3, 7, 2
TIMEOUT_S = 300.0


def sums() -> Iterator[Prompt]:
    """Endless two-digit sums."""
    number = 0
    while True:
        number += 1
        yield Prompt(text=f"{number * 7 % 90 + 10}+{number * 13 % 90 + 10}=")


def variety(prompt: Prompt, completion: str) -> float:
    """A reward by hash: hardly any group is dropped."""
    return zlib.crc32(f"{prompt.text} {completion}".encode()) % 97 / 97.0


async def step_s(folder: Path, *, setting: str, deterministic: bool) -> dict[str, float]:
    """Median seconds of a step and of what the trainer waits in it; processor seconds a step of the controller, where the engine is."""
    here = Path(__file__)
    config = parse_config({
        "model": {"kind": "folder", "path": str(folder / "model")}, "prompts": {"kind": "function", "function": f"{here}:sums"},
        "engine": {"kind": "inline"}, "sampling": {"max_new_tokens": 4}, "env": {"reward": f"{here}:variety"},
        "buffer": {"groups_per_step": 32, "group_size": 16, **SETTINGS[setting]},
        "advantages": "grpo", "correction": "token_tis", "loss": "decoupled_ppo", "trainer": {"learning_rate": 1e-4},
        "weights": {"interruption": "drain", "dtype": "float32"},
        "run": {"name": "run", "folder": str(folder), "steps": STEPS, "deterministic": deterministic},
    }, base=here.parent)
    async with build(config, model=folder / "model") as run:
        rows, cpu_s = [], 0.0
        async for report in run.steps(STEPS):
            rows.append(report.metrics)
            if report.index == WARM_UP_STEPS:
                cpu_s = time.process_time()
        cpu_s, rows = (time.process_time() - cpu_s) / (STEPS - WARM_UP_STEPS), rows[WARM_UP_STEPS:]
    return {"cpu_s": cpu_s, "step_s": statistics.median(row["train/period_s/last"] for row in rows),
            "wait_s": statistics.median(row["train/period_s/last"] * row["trainer/wait_frac/last"] for row in rows)}


def measured_apart(folder: Path, *, setting: str, deterministic: bool) -> dict[str, float]:
    """`step_s` in a process of its own."""
    answer = subprocess.run([sys.executable, __file__, "--measure", str(folder), setting, str(int(deterministic))], check=True,
                            env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, timeout=TIMEOUT_S)
    return json.loads(answer.stdout.splitlines()[-1])


def compared(folder: Path, *, setting: str) -> dict[str, Any]:
    """Both sides of one setting, in turns."""
    pairs = [{name: measured_apart(folder, setting=setting, deterministic=name == "deterministic") for name in ("plain", "deterministic")}
             for _ in range(PAIRS)]
    def ratios(name: str) -> list[float]:
        return [round(pair["deterministic"][name] / pair["plain"][name], 3) for pair in pairs]

    return {"setting": setting, "ratio": statistics.median(ratios("step_s")), "ratios": ratios("step_s"),
            "cpu_ratio": statistics.median(ratios("cpu_s")), "cpu_ratios": ratios("cpu_s"), "pairs": pairs}


def main() -> None:
    """Measure both settings, or one run for `measured_apart`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", nargs=3, metavar=("FOLDER", "SETTING", "DETERMINISTIC"))
    if given := parser.parse_args().measure:
        print(json.dumps(asyncio.run(step_s(Path(given[0]), setting=given[1], deterministic=given[2] == "1"))))
        return
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        model.mkdir()
        load_function(f"{ROOT}/recipes/arithmetic/task.py:tiny_qwen3", field="model.function")(model, **MODEL)
        settings = [compared(Path(folder), setting=setting) for setting in SETTINGS]
    for setting in settings:
        print(setting["setting"], setting["ratio"], setting["ratios"], "of processor time", setting["cpu_ratio"], setting["cpu_ratios"])
    RESULT.write_text(json.dumps({"benchmark": "determinism", "machine": machine(), "commit": commit(), "settings": settings},
                                 indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
