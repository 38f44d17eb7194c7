"""Seconds of a plan, in this process. `python benchmarks/plan.py` writes results/plan.json."""

from __future__ import annotations

import json
import statistics
import time

from machine import ROOT, commit, machine

from asyncrl.plan.hardware import hardware_named
from asyncrl.plan.lengths import Lognormal, MeanMax
from asyncrl.plan.models import model_named
from asyncrl.plan.phases import Setup
from asyncrl.plan.step import plan_step
from asyncrl.plan.workload import Algorithm, Placement, Workload

RESULT = ROOT / "benchmarks" / "results" / "plan.json"
REPEATS = 50


def setups() -> dict[str, Setup]:
    """The reference on 64 GPUs; log-normal lengths there, and on 4 096."""
    lengths = {"reference, 64 GPUs": (MeanMax(8192, 32_768), 64, 1), "log-normal, 64 GPUs": (Lognormal(8192, 32_768), 64, 8),
               "log-normal, 4096 GPUs": (Lognormal(8192, 32_768), 4096, 8)}
    return {name: Setup(model=model_named("llama-3-8b"), hardware=hardware_named("h100"), algorithm=Algorithm(),
                        workload=Workload(prompts=512, group_size=16, prompt_tokens=500, lengths=drawn),
                        placement=Placement(gpus=gpus, unit_gpus=unit)) for name, (drawn, gpus, unit) in lengths.items()}


def timed(setup: Setup) -> dict[str, float]:
    """Median and longest of the repeats, the first one included."""
    seconds = []
    for _ in range(REPEATS):
        began_s = time.perf_counter()
        plan_step(setup)
        seconds.append(time.perf_counter() - began_s)
    return {"median_s": round(statistics.median(seconds), 5), "max_s": round(max(seconds), 5)}


def main() -> None:
    """Time each and write the JSON."""
    result = {"benchmark": "plan", "commit": commit(), "machine": machine(), "repeats": REPEATS,
              "plans": {name: timed(setup) for name, setup in setups().items()}}
    RESULT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result["plans"], indent=2))


if __name__ == "__main__":
    main()
