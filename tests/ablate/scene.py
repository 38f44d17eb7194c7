"""An ablation over a recipe that parses, and runs that only pretend to train: `fake_train.py` writes their rows.

As a script, `scene.py FILE FOLDER JOBS`, it is `asyncrl ablate` with such runs, for tests that kill it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl import yaml_text
from asyncrl.ablate import runs
from asyncrl.ablate.command import Plan, read_plan
from asyncrl.cli import main

HERE = Path(__file__).parent
EFFECTS_TASK = HERE.parent / "effects_task.py"
RECIPE: dict[str, Any] = {
    "model": {"kind": "folder", "path": "model"},
    "prompts": {"kind": "function", "function": f"{EFFECTS_TASK}:questions", "arguments": {}},
    "engine": "inline", "sampling": {"max_new_tokens": 4}, "env": {"kind": "single_turn", "reward": f"{EFFECTS_TASK}:always_one"},
    "buffer": {"groups_per_step": 2, "group_size": 3, "max_staleness": 1}, "advantages": "grpo", "correction": "token_tis",
    "loss": "decoupled_ppo", "trainer": {"learning_rate": 3e-2}, "run": {"name": "base", "steps": 5}}
ABLATION: dict[str, Any] = {
    "recipe": "base", "steps": 3, "seeds": [0, 1],
    "axes": {"rate": {"kind": "values", "keys": ["trainer.learning_rate"], "values": [0.01, 0.02]},
             "arm": {"kind": "points", "points": {"plain": {"loss.kind": "ppo", "correction": "none"},
                                                  "corrected": {"correction.truncate_high": 3.0}}}},
    "report": {"reward": {"metric": "reward/total/mean", "last_steps": 2},
               "held-out": {"metric": "eval/held_out/reward/mean", "stat": "last"}}}


def write(folder: Path, **changes: Any) -> Path:
    """The recipe, and the ablation with some sections replaced, or gone where they are None; the ablation's place."""
    (folder / "base.yaml").write_text(yaml_text.write(RECIPE), encoding="utf-8")
    tree = {key: value for key, value in (ABLATION | changes).items() if value is not None}
    (folder / "small.yaml").write_text(yaml_text.write(tree), encoding="utf-8")
    return folder / "small.yaml"


def planned(folder: Path, *, jobs: int = 1, **changes: Any) -> Plan:
    """The plan of what `write` writes."""
    return read_plan(write(folder, **changes), out=folder / "out", quick=False, jobs=jobs)


def fake_command(recipe: Path) -> list[str]:
    """In the place of `asyncrl train`."""
    return [sys.executable, str(HERE / "fake_train.py"), str(recipe)]


@pytest.fixture
def pretending(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs pretend to train."""
    monkeypatch.setattr(runs, "command_of", fake_command)


if __name__ == "__main__":
    file, folder, jobs = sys.argv[1:]
    runs.command_of = fake_command
    sys.exit(main(["ablate", file, "--out", folder, "--jobs", jobs]))
