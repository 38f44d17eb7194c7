"""docs/start.md, done: the files it shows, the commands it gives, with a random model in place of the demo's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from asyncrl.observe.plain import HEADER
from asyncrl.run_state import load_state
from asyncrl.train.checkpoint_store import newest
from tests.docs.pages import ROOT, block_with
from tests.tiny_model import make_tiny_model

LIMIT_S = 100.0

Do = Callable[..., str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the reader stands, with `mine` as the page has it."""
    folder = tmp_path_factory.mktemp("start")
    make_tiny_model(folder / "runs" / "quickstart" / "model")
    (folder / "mine").mkdir()
    for name, first_line in (("task.py", '"""Sums whose'), ("carry.yaml", "# Sums that carry"), ("script.py", '"""The same as a script')):
        (folder / "mine" / name).write_text(block_with("start.md", first_line), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def do(folder: Path) -> Do:
    """Run Python with these arguments there; gives what it said."""

    def do(*arguments: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S,
                              check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    do("mine/task.py")
    return do


def test_the_data_are_as_the_recipe_reads_them(do: Do, folder: Path) -> None:
    recipe = yaml.safe_load((folder / "mine" / "carry.yaml").read_text(encoding="utf-8"))
    paths = recipe["prompts"]["path"], recipe["eval"]["sets"]["carry"]["prompts"]["path"]
    train, held_out = ([json.loads(line) for line in (folder / "mine" / path).read_text(encoding="utf-8").splitlines()] for path in paths)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    assert all(row["answer"] == f"{int(row['prompt'][:2]) + int(row['prompt'][3:5]):03d}" for row in train)


def test_the_screen_shown_has_the_columns_of_the_console() -> None:
    assert HEADER in (ROOT / "docs" / "start.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_recipe_trains_is_watched_and_goes_on(do: Do, folder: Path) -> None:
    small = ["buffer.groups_per_step=2", "buffer.group_size=4", "eval.sets.carry.limit=4", "buffer.zero_variance=keep"]
    do("-m", "asyncrl.cli", "train", "mine/carry.yaml", "run.steps=2", *small)
    assert "step 2 of 2" in do("-m", "asyncrl.cli", "watch", "carry", "--once")
    do("-m", "asyncrl.cli", "train", "mine/carry.yaml", "--resume", "run.steps=3", *small)
    checkpoint = newest(folder / "runs" / "carry" / "checkpoints")
    assert checkpoint is not None
    assert load_state(checkpoint).index == 3
    for name in ("model", "best", "summary.json", "reward.png", "metrics.jsonl", "rollouts.jsonl", "config.yaml", "checkpoints", "logs"):
        assert (folder / "runs" / "carry" / name).exists(), name
    (folder / "look.py").write_text(block_with("start.md", "import json\n\nwith open"), encoding="utf-8")
    looked = do("look.py").splitlines()
    assert len(json.loads(looked[0])) == 3
    assert len(looked) == 1 + 4


@pytest.mark.slow
def test_the_script_trains_goes_on_and_evaluates(do: Do, folder: Path) -> None:
    shown = (folder / "mine" / "script.py").read_text(encoding="utf-8")
    small = shown.replace("groups_per_step=16, group_size=16", 'groups_per_step=2, group_size=4, zero_variance="keep"')
    assert small != shown
    (folder / "mine" / "small.py").write_text(small, encoding="utf-8")
    assert [line.split()[0] for line in do("mine/small.py", "1").splitlines()] == ["1", "held"]
    assert [line.split()[0] for line in do("mine/small.py", "2").splitlines()] == ["2", "held"]
    assert (folder / "runs" / "carry-script" / "model" / "config.json").exists()
