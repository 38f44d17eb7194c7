"""What `asyncrl train` does before the run: the model is prepared whole, or nothing of it is left."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import yaml

from asyncrl import run_folder, training
from asyncrl.accounting import Ledger
from asyncrl.config import RunConfig, parse_config
from asyncrl.errors import ChildDied, ConfigError, RunAborted
from asyncrl.observe.console import Console
from asyncrl.observe.plain import PlainFace
from asyncrl.preflight import check_environment
from asyncrl.rollout.transformers_engine import TransformersEngine
from asyncrl.run_state import RunState
from asyncrl.training import prepare_model
from tests.tiny_model import make_tiny_model

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


@pytest.mark.parametrize(("section", "change"), [
    ("prompts", {"arguments": {"sed": 0}}), ("model", {"arguments": {"layer": 4}}), ("warm_up", {"arguments": {"noises": 0.3}}),
    ("eval.sets.held_out.prompts", {"sets": {"held_out": {"prompts": {
        "kind": "function", "function": "task.py:held_out_sums", "arguments": {"cnt": 2}}}}})])
def test_arguments_that_a_named_function_does_not_take_are_refused_before_anything_starts(section, change):
    tree = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    tree[section.split(".")[0]] |= change
    with pytest.raises(ConfigError, match=rf"^{section}\.arguments"):
        check_environment(parse_config(tree, base=RECIPE.parent))


def test_that_the_processes_start_is_said_before_they_do(tmp_path, monkeypatch):
    async def prepared(config, **options):
        return tmp_path

    def build(config, **options):
        raise RunAborted("no further")

    monkeypatch.setattr(training, "prepare_model", prepared)
    monkeypatch.setattr(training, "build", build)
    lines: list[str] = []
    console = Console(PlainFace(lines.append))
    with pytest.raises(RunAborted):
        asyncio.run(training.train(made_by("tiny_model", tmp_path), console=console))
    console.close()
    assert f"reward workers start; what they write is in {tmp_path}" in " ".join(" ".join(lines).split())


@pytest.mark.parametrize(("index", "is_said"), [(99, False), (100, True), (120, True)])
def test_a_resumed_run_without_a_step_left_says_what_to_raise(tmp_path, monkeypatch, index, is_said):
    tree = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    tree["run"] |= {"folder": str(tmp_path), "steps": 100}
    config = parse_config(tree, base=RECIPE.parent)
    account = Ledger().account(buffered=(0, 0), in_flight=(0, 0))
    state = RunState(index=index, version=index, prompts={}, unfinished=(), account=account, buffer={},
                     notes={"config": config.model_dump(mode="json")})
    monkeypatch.setattr(run_folder, "find_checkpoint", lambda folder, resume: folder)
    monkeypatch.setattr(run_folder, "load_state", lambda checkpoint: state)
    warnings: list[str] = []
    console = Console(PlainFace(lambda line: None, warn=warnings.append))
    run_folder.RunFolder(config, console=console, resume="newest").close()
    console.close()
    assert ("raise run.steps = 100" in " ".join(warnings)) is is_said


def test_a_resumed_run_has_an_engine_with_another_random_stream_that_follows_from_the_seed(tmp_path, monkeypatch):
    seeds = []

    def noted(model: Path, **settings: object) -> TransformersEngine:
        seeds.append(settings["seed"])
        return TransformersEngine(model, **settings)

    monkeypatch.setattr(training, "TransformersEngine", noted)
    config = parse_config(yaml.safe_load(RECIPE.read_text(encoding="utf-8")), base=RECIPE.parent)
    for version in (0, 0, 4, 4, 5):
        training.build_engine(config, model=make_tiny_model(tmp_path / "model"), version=version)
    assert seeds[:2] == [config.run.seed] * 2
    assert seeds[2] == seeds[3]
    assert len(set(seeds)) == 3


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


@pytest.mark.slow
def test_a_warm_up_says_how_far_it_is_while_it_goes_on(tmp_path):
    tree = made_by("tiny_model", tmp_path / "runs").model_dump(mode="json")
    tree["model"]["arguments"] = {"hidden": 16}
    tree["warm_up"] = {"kind": "cross_entropy", "examples": f"{TASK}:copies", "held_out": f"{TASK}:held_out_copies", "batch_size": 4,
                       "until_accuracy": 1e-9, "check_every_steps": 2, "threads": 1}
    lines: list[str] = []
    folder = asyncio.run(prepare_model(parse_config(tree, base=tmp_path), logs=tmp_path / "logs", echo=lines.append))
    assert [line.split(":")[0] for line in lines] == ["model", "warm-up step 2", "model"]
    assert (folder / "config.json").is_file()
