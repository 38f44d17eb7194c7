import json
from pathlib import Path

import pytest

from asyncrl.cli import EXIT_OK, EXIT_USAGE, main
from asyncrl.errors import ConfigError
from asyncrl.plan.options import lengths_of_run

REFERENCE = ["plan", "--model", "llama-3-8b", "--gpus", "64", "--hardware", "h100", "--lengths", "deck", "--json"]


def test_the_reference_is_printed_as_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(REFERENCE) == EXIT_OK
    tree = json.loads(capsys.readouterr().out)
    assert tree["mode"] == "deck"
    assert tree["shapes"]["async"]["total_s"] == pytest.approx(619, rel=5e-3)
    assert tree["colocated"]["flop"] == pytest.approx(6.8e18, rel=5e-3)


def test_pictures_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "llama-3-8b", "--gpus", "16", "--plot", str(tmp_path / "new")]) == EXIT_OK
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["shapes.png", "staleness.png", "waterfall.png"]
    assert "waterfall.png" in capsys.readouterr().out


def test_advice_ends_in_a_recipe_that_a_dry_run_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "advised.yaml"
    assert main(["plan", "--model", "smollm2-360m", "--gpus", "4", "--prompts", "32", "--max-tokens", "64", "--prompt-tokens", "20",
                 "--advise", str(file)]) == EXIT_OK
    assert "6. Asynchrony." in capsys.readouterr().out
    assert "# 1. Load." in file.read_text()
    assert main(["train", str(file), "--dry-run"]) == EXIT_OK


def test_a_recipe_is_planned_with_its_batch_and_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--recipe", "arithmetic/quickstart", "--model", "smollm2-135m", "--json"]) == EXIT_OK
    tree = json.loads(capsys.readouterr().out)
    assert (tree["placement"]["gpus"], tree["lengths"]["max_tokens"]) == (2, 4)


def test_lengths_are_counted_from_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"loss_mask": [0, 1, 1], "error": None}, {"loss_mask": [0, 1, 1, 1, 1], "error": None}, {"loss_mask": [1], "error": "x"}]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert lengths_of_run(tmp_path).tokens == (2, 4)
    assert main(["plan", "--model", "smollm2-135m", "--gpus", "2", "--lengths", str(tmp_path)]) == EXIT_OK
    assert "at most 4" in capsys.readouterr().out
    (tmp_path / "rollouts.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="KeyError"):
        lengths_of_run(tmp_path)


@pytest.mark.parametrize(("arguments", "message"), [
    (["--gpus", "0", "--model", "llama-3-8b"], "gpus = 0 is not allowed"), (["--gpus", "8"], "Add --model llama-3-8b"),
    (["--model", "llama-3-8b"], "Add --gpus 64"), (["--model", "llama-9", "--gpus", "8"], "llama-3-8b"),
    (["--model", "llama-3-70b", "--gpus", "8"], "tensor_parallel to 2"),
    (["--model", "deepseek-v3", "--gpus", "64", "--tensor-parallel", "32"], "Take 154 GPUs"),
    (["--model", "llama-3-8b", "--gpus", "64", "--unit-gpus", "48"], "smaller units"),
    (["--model", "llama-3-8b", "--gpus", "64", "--mean-tokens", "nan"], "mean_tokens = nan"),
    (["--model", "llama-3-8b", "--gpus", "64", "--hardware", "custom"], "Add --peak-tflops, --memory-gb, --bandwidth-tb-s"),
    (["--model", "llama-3-8b", "--gpus", "64", "--memory-gb", "10"], "Add --hardware custom"),
    (["--model", "llama-3-8b", "--gpus", "64", "--lengths", "nowhere"], "rollouts.jsonl")])
def test_a_mistake_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments]) == EXIT_USAGE
    told = capsys.readouterr().err
    assert message in told
    assert len(told.splitlines()) == 1
