"""What `asyncrl train` does before the run: the model is prepared whole, or nothing of it is left."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import yaml

from asyncrl.config import RunConfig, parse_config
from asyncrl.errors import ChildDied
from asyncrl.training import prepare_model

TASK = Path(__file__).parent / "train" / "prepare_task.py"
RECIPE = Path(__file__).parents[1] / "recipes" / "arithmetic" / "quickstart.yaml"


def made_by(function: str, folder: Path) -> RunConfig:
    """A run without a warm-up whose model `function` of the task makes."""
    tree = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    tree |= {"model": {"kind": "function", "function": f"{TASK}:{function}"}, "warm_up": {"kind": "none"}}
    tree["run"]["folder"] = str(folder)
    return parse_config(tree, base=RECIPE.parent)


def prepare(config: RunConfig, logs: Path) -> Path:
    return asyncio.run(prepare_model(config, logs=logs, echo=lambda line: None))


def wait_for_a_file(cache: Path) -> None:
    """Returns when the model function has written its first file."""
    deadline_s = time.monotonic() + 60.0
    while not list(cache.glob("*/config.json")):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.slow
def test_a_preparation_that_is_killed_leaves_no_half_folder(tmp_path):
    config = made_by("killed_half_way", tmp_path / "runs")
    with pytest.raises(ChildDied, match="signal 9"):
        prepare(config, tmp_path / "logs")
    assert list((tmp_path / "runs" / ".cache").iterdir()) == []


@pytest.mark.slow
def test_a_preparation_that_is_interrupted_leaves_no_half_folder(tmp_path):
    config = made_by("endless", tmp_path / "runs")

    async def interrupted() -> None:
        work = asyncio.create_task(prepare_model(config, logs=tmp_path / "logs", echo=lambda line: None))
        await asyncio.to_thread(wait_for_a_file, tmp_path / "runs" / ".cache")
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    asyncio.run(interrupted())
    assert list((tmp_path / "runs" / ".cache").iterdir()) == []
