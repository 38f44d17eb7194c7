"""The arithmetic of the trainer's benchmark, that it runs, and that the page says what it found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config

from benchmarks import trainer, trainer_gpu, trainer_page, trainer_steps
from benchmarks.contestants import ratio


def test_a_ratio_is_taken_within_a_round() -> None:
    """A machine that slows down in the second round slows both."""
    assert ratio({"seconds": [1.0, 20.0, 1.0]}, {"seconds": [2.0, 40.0, 1.0]}) == 0.5


@pytest.mark.parametrize(("name", "tokens"), [("0.6M", 16_798), ("135M", 1_700)])
def test_the_batches_have_the_size_they_are_said_to_have(name: str, tokens: int) -> None:
    setting = trainer_steps.SETTINGS[name]
    drawn = trainer_steps.draw(setting)
    assert drawn == trainer_steps.draw(setting)
    assert trainer_steps.tokens_of(drawn) == pytest.approx(tokens, rel=0.1)
    batch = trainer_steps.batch_of(drawn)
    assert [rollout.reward for rollout in batch.rollouts] == drawn["rewards"]
    assert sum(len(sequence) for rollout in batch.rollouts for sequence in rollout.sequences) == trainer_steps.tokens_of(drawn)


def test_a_packed_row_predicts_as_many_tokens_as_it_has() -> None:
    inputs = trainer_gpu.packed_row(50, (5, 3), torch.device("cpu"))
    assert (len(inputs.tokens), len(inputs.targets)) == (8, 8)
    assert inputs.positions.tolist() in ([0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 0, 1, 2])


def test_what_a_gpu_is_measured_with_runs_on_a_cpu() -> None:
    config = Qwen2Config(vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, tie_word_embeddings=True)
    found = trainer_gpu.measured(config, lengths=(5, 3), device="cpu", repeats=1)
    assert (found["attention"], found["tokens"], found["mfu"]) == ("sdpa", 8, None)


@pytest.mark.slow
def test_the_quick_profile_runs_and_writes_what_the_page_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_steps, "is_installed", lambda name: False)
    trainer.main(["--quick", "--threads", "1", "--out", str(tmp_path), "--only", "head", "steps-0.6M"])
    steps = json.loads((tmp_path / "steps-0.6M.json").read_text(encoding="utf-8"))
    assert list(steps["trainers"]) == ["asyncrl", "sequences", "packed"]
    assert json.loads((tmp_path / "head.json").read_text(encoding="utf-8"))["gradient_gap"] < 1e-5
    assert "| asyncrl |" in trainer_page.tables(tmp_path)


def test_quick_results_are_not_kept() -> None:
    with pytest.raises(SystemExit, match="--out"):
        trainer.main(["--quick"])


def test_the_page_says_what_was_measured() -> None:
    text = trainer_page.PAGE.read_text(encoding="utf-8")
    made = text.split(trainer_page.BEGIN)[1].split(trainer_page.END)[0]
    assert made.strip() == trainer_page.tables(trainer.RESULTS)
