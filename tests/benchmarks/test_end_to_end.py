"""What the end-to-end benchmark computes itself, without running a contender."""

from __future__ import annotations

import itertools
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from asyncrl.functions import load_function

ROOT = Path(__file__).parents[2]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import end_to_end

    return end_to_end


def row(*, seconds: float | None, held_out: float = 0.9) -> dict[str, Any]:
    reached = None if seconds is None else {"step": 40, "seconds": seconds}
    return {"reached": reached, "start_up_s": 9.0, "train_s": 30.0, "step_s_median": 0.3,
            "rollouts_per_s": 10.0, "tokens_per_s": 40, "held_out": {"sampled": held_out, "greedy": 1.0}}


def test_the_threshold_is_reached_at_the_end_of_the_first_window_whose_mean_is_there(benchmark: ModuleType) -> None:
    rewards = [0.9, 0.2, 0.6, 0.8, 0.7, 0.9]
    seconds = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert benchmark.seconds_to(0.7, rewards=rewards, seconds=seconds, window=3) == {"step": 5, "seconds": 5.0}
    assert benchmark.seconds_to(0.7, rewards=rewards, seconds=seconds, window=1) == {"step": 1, "seconds": 1.0}
    assert benchmark.seconds_to(0.85, rewards=rewards, seconds=seconds, window=3) is None


def test_fewer_steps_than_the_window_never_reach(benchmark: ModuleType) -> None:
    assert benchmark.seconds_to(0.7, rewards=[1.0] * 9, seconds=range(9), window=10) is None


def test_the_seconds_of_a_step_leave_out_the_first_ones(benchmark: ModuleType) -> None:
    assert benchmark.step_s([10.0, 12.0, 12.5, 13.5, 13.75]) == 0.5


def test_a_run_that_never_reaches_is_counted_and_kept_out_of_the_median(benchmark: ModuleType) -> None:
    summary = benchmark.summarised([row(seconds=20.0, held_out=0.8), row(seconds=None, held_out=0.3), row(seconds=10.0, held_out=0.9)])
    assert (summary["runs"], summary["not_reached"]) == (3, 1)
    assert summary["seconds_to_threshold"] == 15.0
    assert summary["held_out_sampled"] == 0.8
    assert benchmark.summarised([row(seconds=None)])["seconds_to_threshold"] is None


def test_lines_are_stamped_and_a_command_that_fails_or_hangs_is_the_end(benchmark: ModuleType, tmp_path: Path) -> None:
    def watched(code: str, timeout_s: float = 60.0) -> list[tuple[float, str]]:
        return benchmark.watched([sys.executable, "-c", code], log=tmp_path / "log", environment={"GIVEN": "1"}, timeout_s=timeout_s)

    (first_s, first), (second_s, second) = watched("import os; print('a'); print(os.environ['GIVEN'])")
    assert (first, second) == ("a", "1")
    assert 0 < first_s <= second_s
    with pytest.raises(SystemExit, match="told so"):
        watched("raise SystemExit('told so')")
    with pytest.raises(SystemExit, match=f"ended with -{signal.SIGKILL.value}"):
        watched("import signal; signal.pause()", timeout_s=0.2)


def test_trl_follows_the_schedule_of_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import trl_grpo

    from asyncrl.train.schedule import Linear

    schedule = Linear(kind="linear", warm_up_steps=10, total_steps=100, final_frac=0.3)
    mine = [trl_grpo.schedule_factor(step, schedule.model_dump()) for step in range(120)]
    assert mine == pytest.approx([schedule.factor(step) for step in range(120)])


def test_trl_judges_as_the_recipes_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import trl_grpo

    recipes = ROOT / "recipes" / "arithmetic"
    (prompt,) = itertools.islice(load_function(f"{recipes / 'task.py'}:sums", field="prompts")(seed=1), 1)
    right = prompt.columns["answer"]
    for file, answer_after in (("task.py", None), ("long_tail.py", "=")):
        judge = trl_grpo.Judge(answer_after)
        completions = [right, f"++={right}", f"={right}+", "++", "", f"{right}={right}"]
        expected = load_function(f"{recipes / file}:is_correct", field="reward")
        assert judge(completions, completion_ids=[[1, 2]] * 6, answer=[right] * 6) == [expected(prompt, text) for text in completions]
        assert judge.step()["lengths"] == [2] * 6


def test_thinking_is_lognormal_when_each_batch_counts_by_its_mean_over_tokens() -> None:
    examples = load_function(f"{ROOT / 'recipes' / 'arithmetic' / 'long_tail.py'}:thoughtful_sums", field="examples")
    rows = list(itertools.islice(examples(seed=3, batch_size=64), 256 * 64))
    weights: dict[int, float] = {}
    for start in range(0, len(rows), 64):
        lengths = [completion.index("=") for _, completion in rows[start:start + 64]]
        for length in lengths:
            weights[length] = weights.get(length, 0.0) + 1 / sum(length + 5 for length in lengths)

    def share_to(length: int) -> float:
        return sum(weight for each, weight in weights.items() if each <= length) / sum(weights.values())

    assert share_to(12) == pytest.approx(0.5, abs=0.04)
    assert share_to(38) == pytest.approx(0.9, abs=0.02)
    assert 0.98 < share_to(97) < 0.996
    assert max(weights) == 120


def test_thinking_comes_before_the_digits_and_not_in_plain_batches() -> None:
    examples = load_function(f"{ROOT / 'recipes' / 'arithmetic' / 'long_tail.py'}:thoughtful_sums", field="examples")
    rows = list(itertools.islice(examples(seed=3, batch_size=4, plain_batches=8), 64))
    assert {completion.index("=") for _, completion in rows[:32]} == {0}
    prompt, completion = max(rows, key=lambda row: len(row[1]))
    left, right = map(int, prompt.rstrip("=").split("+"))
    thinking, done, digits = completion.rpartition("=")
    assert (set(thinking), done, digits) == ({"+"}, "=", f"{left + right:03d}")
