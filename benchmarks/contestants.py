"""Runs the same contest in several processes, in turns, so that whatever else the machine does falls on all of them."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT


class Contestant:
    """A process that speaks `turns.py`, a context manager."""

    def __init__(self, command: Sequence[str], *, threads: int, log: Path) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        self._log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True, cwd=ROOT,
                                             env=environment | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false",
                                                                "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"})
        self.said = self._answer()
        """What it told when it was ready."""

    def turn(self) -> dict[str, Any]:
        """One turn: `seconds`, `peak_bytes`, and what else it measures."""
        assert self._process.stdin is not None
        self._process.stdin.write("turn\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._log.stem} ended:\n{self._log.read_text(encoding='utf-8', errors='replace')[-3000:]}")
        return json.loads(line)

    def __enter__(self) -> Contestant:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def contest(commands: Mapping[str, Sequence[str]], *, threads: int, rounds: int, logs: Path) -> dict[str, dict[str, Any]]:
    """Of each: seconds of every counted turn in the order of the rounds, their median, the highest memory. The first turn warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    peaks: dict[str, list[int]] = {name: [] for name in commands}
    with ExitStack() as stack:
        running = {name: stack.enter_context(Contestant(command, threads=threads, log=logs / f"{name}.log"))
                   for name, command in commands.items()}
        for number in range(rounds + 1):
            for name, contestant in running.items():
                turn = contestant.turn()
                peaks[name].append(turn["peak_bytes"])
                if number:
                    seconds[name].append(turn["seconds"])
        said = {name: contestant.said for name, contestant in running.items()}
    return {name: {"seconds": [round(value, 4) for value in seconds[name]], "median_s": round(statistics.median(seconds[name]), 4),
                   "peak_mib": round(max(peaks[name]) / 2**20, 1), **said[name]} for name in commands}


def ratio(over: Mapping[str, Any], under: Mapping[str, Any]) -> float:
    """The median, over rounds, of one's seconds over another's in the same round."""
    return statistics.median(mine / theirs for mine, theirs in zip(over["seconds"], under["seconds"], strict=True))
