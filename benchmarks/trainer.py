"""What a trainer's step costs: the output layer beside `F.cross_entropy`, whole steps beside TRL and plain loops, 1, 2 and 4 ranks.

    make .venv-peers/trl/.installed          # TRL's environment, once; without it TRL is left out and nothing is written
    python -m benchmarks.trainer             # everything, writes results/trainer/*.json and the tables of docs/trainer.md
    python -m benchmarks.trainer --only head steps-0.6M steps-135M scaling gpu
    python -m benchmarks.trainer --quick     # a few small steps that say nothing, into --out

All contestants of a table run in processes of their own, on the same data, with the same threads, and take turns; a ratio is the median
over rounds of one's seconds over another's in the same round. Memory is the resident peak of any turn, over what the process held once
its libraries were imported; for the output layer, over its inputs. `load` is the machine's load average before and after: figures of a
machine that has other work to do are not to be compared with those of one that has not. On a machine with a GPU the shapes of Qwen2.5 are
measured too.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import trainer_gpu, trainer_head, trainer_page, trainer_steps
from benchmarks.machine import ROOT, commit, machine
from tests.parity.peers.client import is_installed

RESULTS = ROOT / "benchmarks" / "results" / "trainer"
PREDICTIONS, QUICK_PREDICTIONS = 4096, 64
Section = Callable[[Path, argparse.Namespace], dict[str, Any]]


def head(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The output layer."""
    found = trainer_head.measured(folder, predictions=QUICK_PREDICTIONS if options.quick else PREDICTIONS, threads=options.threads,
                                  rounds=1 if options.quick else 3)
    return found | judged(found["ratios"], trainer_head.TARGETS, at_most=True)


def steps(name: str) -> Section:
    """Whole steps of one setting."""
    def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
        setting = (trainer_steps.QUICK if options.quick else trainer_steps.SETTINGS)[name]
        found = trainer_steps.steps(name, setting, folder=folder, threads=options.threads, rounds=setting.rounds)
        beside_trl = found["ratios"].get("trl")
        if beside_trl is None:
            return found
        return found | {"targets": setting.targets, "met": {
            "tokens_per_s": beside_trl["tokens_per_s"] >= setting.targets["tokens_per_s"],
            "memory": beside_trl["memory"] <= setting.targets["memory"]}}

    return measure


def scaling(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Ranks; no more cores are there than there are."""
    setting = (trainer_steps.QUICK if options.quick else trainer_steps.SETTINGS)["0.6M"]
    return trainer_steps.scaling(setting, folder=folder, rounds=1 if options.quick else 4, counts=(1, 2) if options.quick else (1, 2, 4))


def gpu(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What needs a CUDA device."""
    configs = dict(list(trainer_gpu.CONFIGS.items())[:1]) if options.quick else trainer_gpu.CONFIGS
    return {"device": torch.cuda.get_device_name(), "head_bfloat16": trainer_head.on_gpu(predictions=PREDICTIONS, repeats=5),
            "models": {name: trainer_gpu.measured(config, repeats=3 if options.quick else 10) for name, config in configs.items()}}


def judged(ratios: dict[str, float], targets: dict[str, float], *, at_most: bool) -> dict[str, Any]:
    """The targets beside what was found."""
    return {"targets": targets, "met": {name: (ratios[name] <= most) == at_most for name, most in targets.items()}}


SECTIONS: dict[str, Section] = {"head": head, "steps-0.6M": steps("0.6M"), "steps-135M": steps("135M"), "scaling": scaling, "gpu": gpu}


def sections_of(options: argparse.Namespace) -> list[str]:
    """Those asked for that this machine can do."""
    wanted = options.only or list(SECTIONS)
    if options.quick:
        wanted = [name for name in wanted if name != "steps-135M"]
    if not torch.cuda.is_available():
        if options.only and "gpu" in wanted:
            raise SystemExit("gpu: torch sees no CUDA device")
        wanted = [name for name in wanted if name != "gpu"]
    return wanted


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, write a file a section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(SECTIONS))
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of torch, in every process (default: all cores)")
    parser.add_argument("--quick", action="store_true", help="small, to see that it runs")
    parser.add_argument("--page", action="store_true", help="measure nothing; write the tables of docs/trainer.md from the files")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if options.quick and options.out == RESULTS:
        raise SystemExit("--quick measures nothing worth keeping: give --out a folder of its own")
    wanted = sections_of(options)
    if options.page:
        trainer_page.write(options.out)
        return
    if not options.quick and any(name.startswith("steps") for name in wanted) and not is_installed("trl"):
        raise SystemExit("make .venv-peers/trl/.installed: TRL is not there to be compared with")
    options.out.mkdir(parents=True, exist_ok=True)
    at, ran_on = commit(), machine()
    for name in wanted:
        before = os.getloadavg()[0]
        with tempfile.TemporaryDirectory() as folder:
            found = SECTIONS[name](Path(folder), options)
        result = {"benchmark": f"trainer/{name}", "machine": ran_on, "commit": at, "threads": options.threads,
                  "load": [round(before, 1), round(os.getloadavg()[0], 1)], **found}
        (options.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(name, json.dumps(found.get("ratios", found.get("ranks", found))), "met" if all(found.get("met", {}).values()) else
              f"NOT MET: {[target for target, is_met in found['met'].items() if not is_met]}", flush=True)
    if not options.quick and options.out == RESULTS:
        trainer_page.write(RESULTS)


if __name__ == "__main__":
    main()
