"""Resident memory of a run over 2,000 steps: the controller, its reward workers, and the trainer's rank where it is a child.

`python benchmarks/memory.py` writes results/memory.json. Everything is real but the tokens, which `FakeEngine` makes up: prompts, rewards
in forked workers, buffer, ledger, journal, trainer, checkpoints, weight sync and the files of the run. A process is flat when, from the end
of the warm-up on, its largest resident memory is at most 5% over its smallest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from machine import ROOT, commit, machine

from asyncrl.config import RunConfig, parse_config
from asyncrl.loop import Run
from asyncrl.observe.console import Console, open_console
from asyncrl.rollout.engine import GenerationRequest
from asyncrl.rollout.fake_engine import FakeEngine
from asyncrl.run_folder import RunFolder
from asyncrl.training import build
from asyncrl.types import Prompt

RESULT = ROOT / "benchmarks" / "results" / "memory.json"
STEPS, WARM_UP_STEPS, EVERY_STEPS = 2_000, 300, 20
MOST_GROWTH = 0.05
TIMEOUT_S = 600.0
END_TOKEN, FIRST_TOKEN, CHARACTERS = 1, 2, 14
"""Of the tiny model."""


def questions() -> Iterator[Prompt]:
    """Endless, each another one: nothing may be kept of those that are over."""
    number = 0
    while True:
        number += 1
        yield Prompt(text=f"{number}+{number % 7}=", columns={"number": number})


def variety(prompt: Prompt, completion: str) -> float:
    """One of four rewards, by a hash: some groups are dropped because theirs are equal."""
    return zlib.crc32(f"{prompt.text} {completion}".encode()) % 4 / 4.0


def scribble(request: GenerationRequest, index: int, version: int) -> tuple[int, float]:
    """Tokens by a hash of the request, ending after 1 to 12: no two rollouts are alike."""
    draw = zlib.crc32(f"{request.seed} {index}".encode())
    return (END_TOKEN if draw % 12 == 0 else FIRST_TOKEN + draw % CHARACTERS), -2.6


def configuration(folder: Path, *, model: Path, processes: int, steps: int) -> RunConfig:
    """A recipe of the smallest real run."""
    here = Path(__file__)
    return parse_config({
        "model": {"kind": "folder", "path": str(model)}, "prompts": {"kind": "function", "function": f"{here}:questions"},
        "engine": {"kind": "inline"}, "sampling": {"max_new_tokens": 12}, "env": {"reward": f"{here}:variety"},
        "buffer": {"groups_per_step": 4, "group_size": 3, "max_staleness": 2},
        "advantages": "grpo", "correction": "token_tis", "loss": "decoupled_ppo",
        "trainer": {"processes": processes, "learning_rate": 1e-4}, "weights": {"dtype": "float32"},
        "run": {"name": "memory", "folder": str(folder), "steps": steps, "probe": {"max_mean_gap": 1e9}},
    }, base=here.parent)


async def measure(folder: Path, *, model: Path, processes: int, steps: int) -> dict[str, Any]:
    """One run with a scripted engine in the place of its own: MB by process, at every `EVERY_STEPS` steps, and seconds a step."""
    config = configuration(folder, model=model, processes=processes, steps=steps)
    written = RunFolder(config, console=silent())
    parts, engine = build(config, model=model), FakeEngine(scribble, token_s=0.0, eos_tokens=frozenset({END_TOKEN}))
    run = Run(prompts=parts.prompts, engine=engine, env=parts.env, sampling=parts.sampling, buffer=parts.buffer, trainer=parts.trainer,
              options=parts.options)
    at_steps, resident_mb = [], []
    async with run:
        began_s = time.monotonic()
        written.begin()
        async for report in run.steps(steps):
            written.stepped(report, decode=run.tokenizer.decode)
            engine.calls.clear()  # the fake keeps every call for those who test with it
            if report.index % EVERY_STEPS == 0:
                at_steps.append(report.index)
                resident_mb.append(resident())
        step_s = (time.monotonic() - began_s) / steps
        written.end()
        await run.finish()
        written.summarise(run.account())
    written.close()
    return {"step_s": round(step_s, 4), "steps": at_steps,
            "resident_mb": {name: [row[name] for row in resident_mb] for name in resident_mb[-1]}}


def silent() -> Console:
    """The console of a log file, whose lines go nowhere."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        return open_console(stdout=nowhere, stderr=nowhere)


def resident() -> dict[str, float]:
    """MB of this process and of each below it, by what it is."""
    return {name: int(_status(pid)["VmRSS"].split()[0]) / 1e3 for name, pid in family(os.getpid())}


def family(controller: int) -> Iterator[tuple[str, int]]:
    """Name and id of every process of the run. Those that were forked without a program of their own judge rewards."""
    yield "controller", controller
    for child in _children(controller):
        command = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        if b"asyncrl.train.rank" in command:
            yield "trainer rank", child
        else:
            yield "reward zygote", child
            yield from (("reward worker", worker) for worker in _children(child))


def growth(resident_mb: list[float], *, at_steps: list[int]) -> float:
    """Largest over smallest after the warm-up, minus 1."""
    warm = [mb for mb, step in zip(resident_mb, at_steps, strict=True) if step >= WARM_UP_STEPS]
    return max(warm) / min(warm) - 1.0


def judged(measured: dict[str, Any]) -> dict[str, Any]:
    """The growth of each process beside what was measured, and whether all are flat."""
    by_process = {name: round(growth(values, at_steps=measured["steps"]), 4) for name, values in measured["resident_mb"].items()}
    return {**measured, "growth": by_process, "flat": max(by_process.values()) <= MOST_GROWTH}


def measured_apart(processes: int, *, steps: int = STEPS) -> dict[str, Any]:
    """`measure` in a process of its own, which holds nothing but the run, judged."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        made = Path(folder) / "model"
        subprocess.run([sys.executable, "-c", f"from tests.tiny_model import make_tiny_model; make_tiny_model({str(made)!r})"],
                       env=environment, check=True, capture_output=True, timeout=TIMEOUT_S)
        answer = subprocess.run([sys.executable, __file__, "--measure", str(processes), str(steps), folder], env=environment, check=True,
                                stdout=subprocess.PIPE, timeout=TIMEOUT_S)
    return judged(json.loads(answer.stdout.splitlines()[-1]))


def main() -> None:
    """Measure both settings, or one for `measured_apart`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", nargs=3, metavar=("PROCESSES", "STEPS", "FOLDER"))
    if given := parser.parse_args().measure:
        folder = Path(given[2])
        print(json.dumps(asyncio.run(measure(folder / "runs", model=folder / "model", processes=int(given[0]), steps=int(given[1])))))
        return
    settings = [{"trainer_processes": processes, **measured_apart(processes)} for processes in (0, 1)]
    for setting in settings:
        print(setting["trainer_processes"], setting["growth"], f"{setting['step_s']:.3f} s a step")
    RESULT.write_text(json.dumps({"benchmark": "memory", "machine": machine(), "commit": commit(), "warm_up_steps": WARM_UP_STEPS,
                                  "most_growth": MOST_GROWTH, "settings": settings}, indent=1) + "\n", encoding="utf-8")


def _status(pid: int) -> dict[str, str]:
    return dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines())


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()]


if __name__ == "__main__":
    main()
