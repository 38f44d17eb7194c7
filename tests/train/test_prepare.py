"""The model folder a run starts from: cached by what it depends on, whole or absent, good enough or refused."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
from pathlib import Path

import pytest
import torch

from asyncrl.child import Child
from asyncrl.errors import ConfigError, RunAborted
from asyncrl.train.prepare import cache_key, prepare
from asyncrl.train.prepare_config import CrossEntropyWarmUp, ModelFolder, ModelFunction, NoWarmUp
from tests.train.prepare_task import CHARACTERS

TASK = Path(__file__).with_name("prepare_task.py")
MODEL = ModelFunction(kind="function", function=f"{TASK}:tiny_model", arguments={"hidden": 16})


def warm_up(**settings) -> CrossEntropyWarmUp:
    """Copying one digit: learnt in a few steps."""
    defaults = {"examples": f"{TASK}:copies", "held_out": f"{TASK}:held_out_copies", "until_accuracy": 0.5, "batch_size": 32,
                "learning_rate": 3e-2, "ramp_steps": 2, "max_steps": 200, "threads": 1}
    return CrossEntropyWarmUp(kind="cross_entropy", **(defaults | settings))


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.parent.iterdir() if path.name.startswith(folder.name))


@pytest.fixture(scope="module")
def warmed(tmp_path_factory) -> tuple[Path, dict[str, float]]:
    folder = tmp_path_factory.mktemp("prepared") / "warm"
    return folder, prepare(MODEL, warm_up(), folder=folder)


def test_the_warm_up_reaches_the_accuracy_it_is_asked_for(warmed):
    folder, report = warmed
    assert report["accuracy"] >= 0.5
    assert report["steps"] % 5 == 0
    assert math.isfinite(report["loss"])
    assert json.loads(folder.with_suffix(".json").read_text(encoding="utf-8")) == report


def test_the_accuracy_is_the_mean_probability_of_the_whole_completion(warmed):
    from transformers import AutoModelForCausalLM
    folder, report = warmed
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    eos = CHARACTERS.index("$")
    total = 0.0
    for digit in range(10):
        row = [CHARACTERS.index(str(digit)), CHARACTERS.index("="), CHARACTERS.index(str(digit)), eos]
        with torch.no_grad():
            distribution = net(input_ids=torch.tensor([row])).logits[0].softmax(-1)
        total += float(distribution[1, row[2]] * distribution[2, eos])
    assert report["accuracy"] == pytest.approx(total / 10, rel=1e-4)


def test_the_folder_is_a_hugging_face_model_with_its_tokenizer(warmed):
    folder, _ = warmed
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
    assert leftovers(folder) == ["warm", "warm.json"]


def test_an_accuracy_that_is_not_reached_ends_the_run_and_leaves_no_folder(tmp_path):
    with pytest.raises(RunAborted, match=r"warm_up\.until_accuracy = 0\.99 was not reached in max_steps = 3 \(reached 0\.\d+\)"):
        prepare(MODEL, warm_up(until_accuracy=0.99, max_steps=3), folder=tmp_path / "warm")
    assert leftovers(tmp_path / "warm") == []


def test_the_last_step_is_measured_though_it_is_no_multiple(tmp_path):
    report = prepare(MODEL, warm_up(until_accuracy=1e-9, max_steps=3, check_every_steps=5), folder=tmp_path / "warm")
    assert report["steps"] == 3


def test_the_loss_is_the_mean_over_the_tokens_of_the_completions(tmp_path):
    from transformers import AutoModelForCausalLM
    prepare(MODEL, NoWarmUp(), folder=tmp_path / "cold")
    report = prepare(MODEL, warm_up(until_accuracy=1e-9, check_every_steps=1, batch_size=10), folder=tmp_path / "warm")
    net = AutoModelForCausalLM.from_pretrained(tmp_path / "cold", dtype=torch.float32)
    rows = torch.tensor([[CHARACTERS.index(str(digit)), CHARACTERS.index("="), CHARACTERS.index(str(digit)), 1] for digit in range(10)])
    with torch.no_grad():
        logprobs = net(input_ids=rows).logits[:, 1:3].log_softmax(-1).gather(-1, rows[:, 2:].unsqueeze(-1))
    assert report["loss"] == pytest.approx(-float(logprobs.mean()), rel=1e-5)


def test_without_warm_up_the_model_stays_as_the_function_wrote_it(tmp_path):
    assert prepare(MODEL, NoWarmUp(), folder=tmp_path / "a") == {}
    prepare(MODEL, NoWarmUp(), folder=tmp_path / "b")
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()


def test_a_model_folder_is_copied_and_stays_as_it_was(warmed, tmp_path):
    source, _ = warmed
    before = (source / "model.safetensors").read_bytes()
    prepare(ModelFolder(path=str(source)), warm_up(until_accuracy=1e-9, check_every_steps=1), folder=tmp_path / "more")
    assert (source / "model.safetensors").read_bytes() == before
    assert (tmp_path / "more" / "model.safetensors").read_bytes() != before


def test_a_missing_model_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.path"):
        prepare(ModelFolder(path=str(tmp_path / "none")), NoWarmUp(), folder=tmp_path / "warm")
    assert leftovers(tmp_path / "warm") == []


def test_a_model_function_that_fails_half_way_leaves_nothing(tmp_path):
    broken = ModelFunction(kind="function", function=f"{TASK}:half_a_model")
    with pytest.raises(OSError, match="no space left"):
        prepare(broken, NoWarmUp(), folder=tmp_path / "warm")
    assert leftovers(tmp_path / "warm") == []


def test_a_folder_that_another_run_finished_first_stays(tmp_path):
    prepare(MODEL, NoWarmUp(), folder=tmp_path / "warm")
    (tmp_path / "warm" / "mark").write_text("first", encoding="utf-8")
    prepare(MODEL, NoWarmUp(), folder=tmp_path / "warm")
    assert (tmp_path / "warm" / "mark").read_text(encoding="utf-8") == "first"
    assert leftovers(tmp_path / "warm") == ["warm", "warm.json"]


@pytest.mark.parametrize(("settings", "field"), [({"examples": f"{TASK}:ten_copies"}, "warm_up.examples"),
                                                 ({"held_out": f"{TASK}:no_copies"}, "warm_up.held_out")])
def test_examples_that_end_are_refused(tmp_path, settings, field):
    with pytest.raises(ConfigError) as refused:
        prepare(MODEL, warm_up(until_accuracy=0.999, **settings), folder=tmp_path / "warm")
    assert refused.value.field == field


def test_a_model_without_end_of_sequence_is_refused(tmp_path):
    endless = ModelFunction(kind="function", function=f"{TASK}:tiny_model", arguments={"hidden": 16, "eos_token": None})
    with pytest.raises(ConfigError, match="eos_token_id"):
        prepare(endless, warm_up(), folder=tmp_path / "warm")


def test_a_folder_with_tokenizer_json_alone_is_enough(tmp_path):
    from tests.tiny_model import make_tiny_model
    folder = make_tiny_model(tmp_path / "model")
    assert not (folder / "tokenizer_config.json").exists()
    report = prepare(ModelFolder(path=str(folder)), warm_up(until_accuracy=1e-9, check_every_steps=1), folder=tmp_path / "warm")
    assert report["steps"] == 1


def test_a_child_prepares_tells_how_far_it_is_and_hands_the_report_back(tmp_path):
    async def main():
        folder = tmp_path / "warm"
        easy = warm_up(until_accuracy=1e-9, check_every_steps=2)
        spec = {"model": MODEL.model_dump(), "warm_up": easy.model_dump(), "folder": str(folder)}
        child = await Child.start("asyncrl.train.prepare", name="prepare", spec=spec, logs=tmp_path / "logs")
        try:
            async with asyncio.timeout(120.0):
                return [reply.body async for reply in child.stream("prepare")]
        finally:
            await child.close()
    told, report = asyncio.run(main())
    assert report["steps"] == 2
    assert re.fullmatch(r"warm-up step 2: accuracy \d\.\d{3} of 1e-09, loss \d\.\d{3}", told["told"])
    assert told["told"] in (tmp_path / "logs" / "prepare.log").read_text(encoding="utf-8").splitlines()
    assert (tmp_path / "warm" / "config.json").is_file()


@pytest.mark.parametrize("changed", [
    {"until_accuracy": 0.6}, {"batch_size": 33}, {"learning_rate": 1e-3}, {"betas": (0.9, 0.99)}, {"ramp_steps": 3},
    {"check_every_steps": 6}, {"max_steps": 201}, {"threads": 2}, {"seed": 1}, {"arguments": {"noise": 0.1}},
    {"examples": f"{TASK}:ten_copies"},
    {"held_out": f"{TASK}:no_copies"}])
def test_the_cache_key_changes_with_every_setting_of_the_warm_up(changed):
    assert set(changed) < set(CrossEntropyWarmUp.model_fields)
    assert cache_key(MODEL, warm_up(**changed)) != cache_key(MODEL, warm_up())


def test_the_cache_key_changes_with_the_model():
    keys = {cache_key(model, warm_up()) for model in (
        MODEL, MODEL.model_copy(update={"arguments": {"hidden": 32}}), MODEL.model_copy(update={"function": f"{TASK}:half_a_model"}),
        ModelFolder(path="some/folder"), ModelFolder(path="other/folder"))}
    assert len(keys | {cache_key(MODEL, NoWarmUp())}) == 6


def test_the_cache_key_is_the_same_for_the_same_settings():
    assert cache_key(MODEL, warm_up()) == cache_key(ModelFunction(**MODEL.model_dump()), warm_up())


@pytest.mark.parametrize("named", ["model", "examples", "held_out"])
def test_the_cache_key_changes_with_the_source_of_each_named_file(tmp_path, named):
    path = tmp_path / "task.py"
    path.write_text("def f(): ...\n", encoding="utf-8")
    model = MODEL.model_copy(update={"function": f"{path}:f"}) if named == "model" else MODEL
    config = warm_up(**({} if named == "model" else {named: f"{path}:f"}))
    before = cache_key(model, config)
    path.write_text("def f(): return 1\n", encoding="utf-8")
    assert cache_key(model, config) != before


def test_the_cache_key_changes_with_the_source_of_a_named_module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "a_task_of_this_test.py"
    path.write_text("def f(): ...\n", encoding="utf-8")
    before = cache_key(MODEL, warm_up(examples="a_task_of_this_test:f"))
    path.write_text("def f(): return 1\n", encoding="utf-8")
    assert cache_key(MODEL, warm_up(examples="a_task_of_this_test:f")) != before


def test_the_cache_key_changes_with_the_files_of_a_model_folder(tmp_path):
    model, weights = ModelFolder(path=str(tmp_path)), tmp_path / "model.safetensors"
    weights.write_bytes(b"1234")
    before = cache_key(model, warm_up())
    os.utime(weights, (1, 1))
    assert cache_key(model, warm_up()) != before
    assert cache_key(model, warm_up()) == cache_key(model, warm_up())
