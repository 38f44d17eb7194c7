"""Whatever can be known to be wrong is refused before anything starts, by one message that docs/faults.md explains, with exit code 2."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from asyncrl import cli, place_check
from asyncrl.config import parse_config
from asyncrl.errors import ConfigError
from asyncrl.preflight import check_environment, needs_of
from tests.preflight_scene import CASES, Scene, add_token, lock
from tests.tiny_model import make_tiny_model
from tests.tiny_moe import make_tiny_moe

PAGE = Path(__file__).parents[1] / "docs" / "faults.md"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def scene(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.chdir(tmp_path)
    return Scene(tmp_path, model, monkeypatch)


def page_patterns() -> list[str]:
    """The messages of the page's table of refusals; an ellipsis stands for anything."""
    section = PAGE.read_text(encoding="utf-8").split("## Before anything starts", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"^\| `(.+?)` \|", section, re.MULTILINE)


def matches(pattern: str, message: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, pattern.split("…"))), message, re.DOTALL) is not None


def refusal(scene: Scene, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command line says."""
    started: list[object] = []

    async def train(config: object, **options: object) -> None:
        started.append(config)

    scene.patch.setattr(cli, "train", train)
    assert cli.main(["train", str(scene.recipe())]) == cli.EXIT_USAGE
    assert not started
    return capsys.readouterr().err.rstrip().removeprefix("asyncrl: ")


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_message_of_the_page_and_exit_code_2_before_anything_starts(case: str, scene: Scene,
                                                                                    capsys: pytest.CaptureFixture[str]) -> None:
    CASES[case](scene)
    message = refusal(scene, capsys)
    assert " is not allowed: " in message
    assert [pattern for pattern in page_patterns() if matches(pattern, message)], f"docs/faults.md does not explain: {message}"
    assert not (scene.folder / "runs").exists()


def test_every_refusal_on_the_page_is_produced_by_a_case(model: Path, tmp_path_factory: pytest.TempPathFactory,
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    messages = []
    for case, spoil in CASES.items():
        with pytest.MonkeyPatch.context() as patch:
            folder = tmp_path_factory.mktemp("case")
            patch.chdir(folder)
            scene = Scene(folder, model, patch)
            spoil(scene)
            messages.append(refusal(scene, capsys))
            assert messages[-1], case
    assert [pattern for pattern in page_patterns() if not any(matches(pattern, message) for message in messages)] == []


def test_what_is_whole_passes_and_leaves_nothing(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> None:
    shared = tmp_path_factory.mktemp("shared")  # in the machine's own others come and go
    scene.patch.setattr(place_check, "shared_place", lambda: shared)
    before = sorted(os.listdir(scene.folder))
    check_environment(parse_config(scene.tree, base=scene.folder))
    assert sorted(set(os.listdir(scene.folder)) - {"__pycache__"}) == before
    assert os.listdir(shared) == []


def test_one_long_prompt_among_short_ones_is_no_reason_to_refuse(scene: Scene) -> None:
    scene.jsonl(b'{"prompt": "' + b"1" * 500 + b'"}\n{"prompt": "1"}\n')
    check_environment(parse_config(scene.tree, base=scene.folder))


def test_a_vocabulary_that_is_padded_is_fine(scene: Scene, tmp_path: Path) -> None:
    scene.model = make_tiny_model(tmp_path / "padded", vocab=64)
    scene.set("model.path", str(scene.model))
    check_environment(parse_config(scene.tree, base=scene.folder))


def test_what_a_run_takes_is_worked_out_from_the_model(scene: Scene) -> None:
    scene.set("weights.dtype", "float32")
    sizes = needs_of(parse_config(scene.tree, base=scene.folder))
    weights_bytes = (scene.model / "model.safetensors").stat().st_size
    batch_bytes = 2 * 2 * 4 * 32
    parameters = (sizes.shared_bytes - batch_bytes) // (2 * 4)
    assert 0 < weights_bytes - 4 * parameters < 10_000  # the header
    assert sizes.disk_bytes == 4 * parameters + 12 * parameters
    assert sizes.memory_bytes == 20 * parameters
    scene.set("reference", {"kind": "in_loss", "coefficient": 0.1})
    assert needs_of(parse_config(scene.tree, base=scene.folder)).memory_bytes == 24 * parameters
    scene.set("advantages", {"kind": "gae"})
    beside = needs_of(parse_config(scene.tree, base=scene.folder))
    assert (beside.memory_bytes, beside.disk_bytes) == (40 * parameters, 4 * parameters + 24 * parameters)
    assert beside.shared_bytes == sizes.shared_bytes
    scene.set("advantages", {"kind": "grpo"})
    scene.set("lora", {"kind": "lora", "rank": 1})
    adapted = needs_of(parse_config(scene.tree, base=scene.folder))
    matrices = [tensor.shape for tensor in load_file(scene.model / "model.safetensors").values() if tensor.ndim == 2]
    trained = sum(rows + columns for rows, columns in matrices)
    assert adapted.memory_bytes == (4 + 4) * parameters + (4 + 8 + 4) * trained, "the frozen model is the reference too"
    assert adapted.disk_bytes == 4 * parameters + 12 * trained
    scene.set("lora", "none")
    scene.set("eval", {"kind": "sets", "sets": {"held_out": {"prompts": {"kind": "function", "function": "task.py:questions"}}}})
    assert needs_of(parse_config(scene.tree, base=scene.folder)).disk_bytes == 3 * 4 * parameters + 12 * parameters
    scene.set("eval.best", {"kind": "none"})
    for steps, every, checkpoints in ((100, None, 1), (100, 60, 2), (100, 20, 3)):
        scene.set("run.steps", steps)
        scene.set("trainer.checkpoint_every_steps", every)
        held = (4 + 12 * checkpoints) * parameters
        assert needs_of(parse_config(scene.tree, base=scene.folder)).disk_bytes == held, "the newest two, and the one being written"


def test_shared_memory_holds_the_experts_of_each_token_that_are_replayed(scene: Scene) -> None:
    """Two layers, two experts of a token, two bytes each."""
    scene.set("model.path", str(make_tiny_moe(scene.folder / "moe")))
    without = needs_of(parse_config(scene.tree, base=scene.folder)).shared_bytes
    scene.set("trainer.routing_replay", True)
    assert needs_of(parse_config(scene.tree, base=scene.folder)).shared_bytes == without + 2 * 2 * 4 * (2 * 2 * 2)


def test_shared_memory_holds_every_batch_since_a_checkpoint(scene: Scene) -> None:
    """What a rank that dies is given again."""
    def shared_bytes(**trainer: object) -> int:
        for name, value in trainer.items():
            scene.set(f"trainer.{name}", value)
        return needs_of(parse_config(scene.tree, base=scene.folder)).shared_bytes

    scene.set("run.steps", 1000)
    batch_bytes, alone = 2 * 2 * 4 * 32, shared_bytes(processes=0)
    assert shared_bytes(processes=1, checkpoint_every_steps=10) - alone == 11 * batch_bytes
    assert shared_bytes(checkpoint_every_steps=None) - alone == 999 * batch_bytes


def test_a_file_saved_with_a_byte_order_mark_and_windows_line_ends_is_read(scene: Scene) -> None:
    scene.jsonl(b'\xef\xbb\xbf{"prompt": "1+1="}\r\n{"prompt": "1+2="}\r\n')
    check_environment(parse_config(scene.tree, base=scene.folder))


def test_an_added_token_beyond_the_vocabulary_is_refused_only_where_a_prompt_holds_it(scene: Scene) -> None:
    add_token(scene, "<image>")
    scene.set("prompts.arguments", {"text": "1+1="})
    check_environment(parse_config(scene.tree, base=scene.folder))
    scene.set("prompts.arguments", {"text": "1<image>"})
    with pytest.raises(ConfigError, match=r"^prompts = .token 16.*below the model's vocab_size 16"):
        check_environment(parse_config(scene.tree, base=scene.folder))


@pytest.mark.parametrize("text", ['[1]\n', '{"prompt": 3}\n', ""])
def test_a_held_out_file_is_refused_under_the_name_of_its_set(scene: Scene, text: str) -> None:
    (scene.folder / "hard.jsonl").write_text(text)
    scene.set("eval", {"kind": "sets", "sets": {"hard": {"prompts": {"kind": "jsonl", "path": str(scene.folder / "hard.jsonl")}}}})
    with pytest.raises(ConfigError) as refused:
        check_environment(parse_config(scene.tree, base=scene.folder))
    assert refused.value.field.startswith("eval.sets.hard.prompts")


@pytest.mark.parametrize(("locked", "field"), [
    ("model", "model"), ("model/config.json", "model"), ("model/model.safetensors", "model"),
    ("data/rows.jsonl", "prompts.path"), ("data", "prompts.path"), ("runs", "run.folder"), ("recipe.yaml", "recipe")])
def test_what_the_user_may_not_read_or_write_is_refused_with_the_kernels_words(scene: Scene, locked: str, field: str,
                                                                              capsys: pytest.CaptureFixture[str]) -> None:
    (scene.folder / "data").mkdir()
    (scene.folder / "data" / "rows.jsonl").write_text('{"prompt": "1"}')
    (scene.folder / "runs").mkdir()
    if field == "prompts.path":
        scene.tree["prompts"] = {"kind": "jsonl", "path": str(scene.folder / "data" / "rows.jsonl")}
    scene.path = scene.recipe()
    lock(scene, scene.folder / locked)
    message = refusal(scene, capsys)
    assert message.startswith(f"{field} = ")
    assert "Permission denied" in message


def test_a_run_that_resumes_needs_no_room_for_what_its_older_checkpoint_takes(scene: Scene) -> None:
    config = parse_config(scene.tree, base=scene.folder)
    checkpoint = scene.folder / "runs" / "r" / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "rank-00000-000.safetensors").write_bytes(b"x" * 1000)
    free = needs_of(config).disk_bytes - 1000
    scene.patch.setattr(place_check, "free_bytes", lambda path: free if path.is_relative_to(scene.folder) else 10**12)
    check_environment(config, resume="newest")
    with pytest.raises(ConfigError, match=r"^run\.folder = "):
        check_environment(config)
    free -= 1
    with pytest.raises(ConfigError, match=r"^run\.folder = "):
        check_environment(config, resume="auto")


def test_room_for_batches_is_asked_for_the_longest_answers_of_any_source(scene: Scene) -> None:
    source = {"kind": "function", "function": "task.py:questions"}
    scene.tree["prompts"] = {"kind": "mixture", "sources": {"short": source, "long": source | {"sampling": {"max_new_tokens": 40}}}}
    mixed = needs_of(parse_config(scene.tree, base=scene.folder)).shared_bytes
    scene.set("prompts", source)
    scene.set("sampling.max_new_tokens", 40)
    assert mixed == needs_of(parse_config(scene.tree, base=scene.folder)).shared_bytes
