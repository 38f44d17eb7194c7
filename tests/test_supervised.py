"""`asyncrl sft`: what it writes, how it goes on, and that no setting of its recipe is without effect."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from asyncrl import cli
from asyncrl.config import load_config
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.observe.jsonl import iterate_jsonl
from asyncrl.recipe_files import supervised_names
from asyncrl.supervised import load_sft, supervise
from asyncrl.train.sft import SFTTrainer
from asyncrl.train.sft_config import SFTConfig
from asyncrl.yaml_text import write

TASK = Path(__file__).with_name("sft_task.py")
PAGE = Path(__file__).parents[1] / "docs" / "sft.md"
SUMS = {"kind": "function", "function": f"{TASK}:sums"}
TREE: dict[str, Any] = {
    "model": {"kind": "function", "function": f"{TASK}:model"}, "data": SUMS, "eval": SUMS | {"arguments": {"largest": 2}},
    "sft": {"batch_size": 10, "epochs": 2, "eval_every_steps": 2},
    "trainer": {"learning_rate": 1e-2, "processes": 0, "checkpoint_every_steps": 2}, "run": {"name": "sums"}}


def recipe(folder: Path, tree: dict[str, Any]) -> Path:
    """The model is made in the working folder of the test, once."""
    file = folder / "recipe.yaml"
    file.write_text(write(tree), encoding="utf-8")
    return file


def train(folder: Path, *settings: str, tree: dict[str, Any] = TREE) -> dict[str, Any]:
    config = load_sft(recipe(folder, tree), [f"run.folder={folder / 'runs'}", *settings])
    return asyncio.run(supervise(config, tell=lambda line: None))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The tree with a model that lies there."""
    from tests.sft_task import model
    folder = tmp_path_factory.mktemp("made") / "model"
    model(folder)
    return TREE | {"model": {"kind": "folder", "path": str(folder)}}


def test_a_run_leaves_a_model_metrics_checkpoints_and_a_summary(made: dict[str, Any], tmp_path: Path,
                                                                capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sft", str(recipe(tmp_path, made)), f"run.folder={tmp_path / 'runs'}"]) == cli.EXIT_OK
    folder = tmp_path / "runs" / "sums"
    assert {path.name for path in folder.iterdir()} >= {"config.yaml", "metrics.jsonl", "summary.json", "checkpoints", "model"}
    rows = list(iterate_jsonl(folder / "metrics.jsonl"))
    assert [row["trainer_step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert [row["trainer_step"] for row in rows if "held_out/loss/mean" in row] == [0, 2, 4, 5]
    assert [row["train/tokens/sum"] for row in rows[1:]] == [20] * 5
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["steps"] == 5
    assert summary["held_out_after"] == rows[-1]["held_out/loss/mean"] < summary["held_out_before"] == rows[0]["held_out/loss/mean"]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-00000004", "step-00000005"]
    assert AutoModelForCausalLM.from_pretrained(folder / "model").config.model_type == "qwen3"
    shown = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"step 0 of 5, held out [\d.]+, accuracy [\d.e-]+", shown[0])
    assert re.fullmatch(r"step 5 of 5, loss [\d.]+, held out [\d.]+, accuracy [\d.e-]+, learning rate 0.01", shown[-1])
    resolved = load_sft(folder / "config.yaml")
    assert resolved.sft.batch_size == 10
    started = load_config("arithmetic/quickstart", [f"model={{kind: folder, path: {folder / 'model'}}}", "warm_up=none"])
    assert Path(started.model.path) == folder / "model"


def test_a_run_that_is_stopped_saves_and_goes_on_with_the_same_bits(made: dict[str, Any], tmp_path: Path,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    made = made | {"sft": made["sft"] | {"epochs": 4}}
    (tmp_path / "whole").mkdir()
    train(tmp_path / "whole", tree=made)
    step = SFTTrainer.step

    async def interrupted(self: SFTTrainer) -> Any:
        if self.version == 2:
            signal.raise_signal(signal.SIGINT)
        return await step(self)

    file, never = recipe(tmp_path, made), "trainer.checkpoint_every_steps=null"
    with monkeypatch.context() as patch:
        patch.setattr(SFTTrainer, "step", interrupted)
        assert cli.main(["sft", str(file), f"run.folder={tmp_path / 'runs'}", never]) == cli.EXIT_INTERRUPTED
    (saved,) = (tmp_path / "runs" / "sums" / "checkpoints").iterdir()
    assert "step-00000002" <= saved.name < "step-00000010"
    assert not (tmp_path / "runs" / "sums" / "model").exists()
    assert cli.main(["sft", str(file), "--resume", f"run.folder={tmp_path / 'runs'}"]) == cli.EXIT_OK
    weights = [(tmp_path / place / "sums" / "model" / "model.safetensors").read_bytes() for place in ("whole/runs", "runs")]
    assert weights[0] == weights[1]
    rows = [list(iterate_jsonl(tmp_path / place / "sums" / "metrics.jsonl")) for place in ("whole/runs", "runs")]
    assert [row["trainer_step"] for row in rows[1]] == list(range(11))
    assert [row.get("train/loss/mean") for row in rows[0]] == [row.get("train/loss/mean") for row in rows[1]]


def test_what_the_last_save_of_a_run_that_is_stopped_fails_with_is_told(made: dict[str, Any], tmp_path: Path,
                                                                        monkeypatch: pytest.MonkeyPatch,
                                                                        capsys: pytest.CaptureFixture[str]) -> None:
    async def failing(self: SFTTrainer, path: Path) -> None:
        raise CheckpointError("the disk is away")

    step = SFTTrainer.step

    async def interrupted(self: SFTTrainer) -> Any:
        if self.version == 1:
            signal.raise_signal(signal.SIGINT)
        return await step(self)

    monkeypatch.setattr(SFTTrainer, "save", failing)
    monkeypatch.setattr(SFTTrainer, "step", interrupted)
    settings = [f"run.folder={tmp_path / 'runs'}", "trainer.checkpoint_every_steps=null"]
    assert cli.main(["sft", str(recipe(tmp_path, made)), *settings]) == cli.EXIT_FAILED
    assert "CheckpointError: the disk is away" in capsys.readouterr().err


FLIPS: dict[str, Any] = {
    "model": {"kind": "function", "function": f"{TASK}:model", "arguments": {"seed": 1}},
    "data": SUMS | {"arguments": {"largest": 4}}, "eval": {"kind": "none"},
    "sft.batch_size": 7, "sft.epochs": 1, "sft.max_steps": 3, "sft.eval_every_steps": 1, "sft.seed": 1, "sft.export_dtype": "bfloat16",
    "lora": {"kind": "lora", "rank": 2}, "trainer": TREE["trainer"] | {"learning_rate": 1e-3},
    "run.name": "other", "run.folder": "elsewhere",
    "run.deterministic": True}


def test_every_field_is_tried() -> None:
    fields = set(SFTConfig.model_fields)
    sections = {"sft": SFTConfig.model_fields["sft"].annotation, "run": SFTConfig.model_fields["run"].annotation}
    assert set(FLIPS) == (fields - set(sections)) | {f"{name}.{field}" for name, section in sections.items()
                                                     for field in section.model_fields}


@pytest.mark.parametrize("field", FLIPS)
def test_a_changed_field_changes_something(field: str, made: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    started: list[bool] = []
    start = SFTTrainer.start

    async def seen(self: SFTTrainer, folder: Path, *, deterministic: bool) -> None:
        started.append(deterministic)
        await start(self, folder)

    monkeypatch.setattr(SFTTrainer, "start", seen)
    outcomes = []
    for value in (None, FLIPS[field]):
        tree = copy.deepcopy(made)
        if value is not None:
            *parents, leaf = field.split(".")
            (tree[parents[0]] if parents else tree)[leaf] = value
        started.clear()
        summary = asyncio.run(supervise(load_sft(recipe(tmp_path, tree)), tell=lambda line: None))
        (model,) = [path for path in tmp_path.rglob("model/model.safetensors") if "outcome" not in path.parts]
        weights = hashlib.sha256(model.read_bytes()).hexdigest()
        rows = [sorted(row) for row in iterate_jsonl(model.parents[1] / "metrics.jsonl")]
        outcomes.append((weights, rows, summary["steps"], model.relative_to(tmp_path), list(started)))
        for path in ("runs", "elsewhere"):
            if (tmp_path / path).exists():
                (tmp_path / path).rename(tmp_path / f"outcome-{len(outcomes)}-{path}")
                for left in (tmp_path / f"outcome-{len(outcomes)}-{path}").rglob("model.safetensors"):
                    left.unlink()
    assert outcomes[0] != outcomes[1]


def test_the_page_has_every_setting() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert [field for field in FLIPS if f"`{field}`" not in page] == []


@pytest.mark.parametrize(("settings", "field"), [
    (["data.function=none.py:x"], "data.function"), ([f"data.function={TASK}:broken"], "data row 2"),
    ([f"eval.function={TASK}:broken", "eval.arguments={}"], "eval row 2"), ([f"data.function={TASK}:endless"], "sft.max_steps"),
    (["data={kind: jsonl, path: none.jsonl}"], "data"), (["data.arguments={sead: 1}"], "data.arguments"),
    (["trainer.epochs=2"], "trainer.epochs"), (["sft.batchsize=2"], "sft.batchsize"), (["sft.batch_size=0"], "sft.batch_size")])
def test_what_cannot_work_is_refused_by_its_place_in_the_recipe(settings: list[str], field: str, made: dict[str, Any],
                                                                tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        train(tmp_path, *settings, tree=made)
    assert refused.value.field == field
    assert not (tmp_path / "runs" / "sums" / "model").exists()


@pytest.mark.parametrize("refused", [[f"data.function={TASK}:broken"], ["trainer.frozen=[nothing]"]])
def test_a_run_that_is_refused_leaves_an_earlier_one_in_its_place(refused: list[str], made: dict[str, Any], tmp_path: Path) -> None:
    train(tmp_path, tree=made)
    runs = tmp_path / "runs"
    before = {file.relative_to(runs) for file in runs.rglob("*")}
    with pytest.raises(ConfigError):
        train(tmp_path, *refused, tree=made)
    assert {file.relative_to(runs) for file in runs.rglob("*")} == before
    train(tmp_path, tree=made)
    assert (runs / "sums.1" / "summary.json").exists()


@pytest.mark.slow
def test_the_recipe_of_the_library_trains(tmp_path: Path) -> None:
    assert supervised_names() == ["sft/arithmetic"]
    config = load_sft("sft/arithmetic", [f"run.folder={tmp_path}", "sft.max_steps=30", "trainer.processes=2", "sft.batch_size=64"])
    told: list[str] = []
    summary = asyncio.run(supervise(config, tell=told.append))
    assert summary["steps"] == 30
    assert summary["loss_last"] < 0.85 * summary["loss_first"]
    assert summary["held_out_after"] < summary["held_out_before"]
    assert (tmp_path / "sums" / "logs" / "trainer-1.log").exists()
