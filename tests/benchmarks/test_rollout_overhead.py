"""The arithmetic of the overhead benchmark; its engines are measured, not tested."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def overhead(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, imported as it is when run: from its own folder."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("rollout_overhead")


def test_the_ratio_is_the_median_over_neighbouring_rounds(overhead: ModuleType) -> None:
    rounds = []
    for bare_s, ours_s in ((10.0, 10.0), (9.0, 10.0), (8.0, 10.0)):
        rounds += [overhead.Round("bare", 1000, bare_s, 4.0), overhead.Round("asyncrl", 1000, ours_s, 5.0)]
    summary = overhead.summarise(rounds)
    assert (summary["ratio"], summary["ratios"]) == (0.9, [1.0, 0.9, 0.8])
    assert (summary["bare_tokens_per_s"], summary["asyncrl_tokens_per_s"]) == (111, 100)
    assert summary["cpu_ratio"] == 1.25


def test_rounds_of_different_work_have_no_ratio(overhead: ModuleType) -> None:
    with pytest.raises(AssertionError):
        overhead.summarise([overhead.Round("bare", 1000, 1.0, 1.0), overhead.Round("asyncrl", 999, 1.0, 1.0)])


def test_work_is_the_same_for_a_seed_and_inside_its_bounds(overhead: ModuleType) -> None:
    work = overhead.make_work(1, requests=2000, clients=8)
    assert work == overhead.make_work(1, requests=2000, clients=8) != overhead.make_work(2, requests=2000, clients=8)
    sizes = [len(prompt) for prompt in work.prompts]
    assert (min(sizes), max(sizes)) == overhead.PROMPT_TOKENS
    assert (min(work.lengths), max(work.lengths)) == overhead.NEW_TOKENS


def test_a_round_is_a_multiple_of_the_clients_and_at_least_two_requests_for_each(overhead: ModuleType) -> None:
    assert overhead.requests_for(20.0, tokens_per_s=1600.0, clients=64) == 192  # 200 requests of 160 tokens, in units of 64
    assert overhead.requests_for(1.0, tokens_per_s=160.0, clients=64) == 128


def test_the_rows_differ_in_nothing_but_what_their_names_say(overhead: ModuleType) -> None:
    rows = overhead.settings()
    assert len({(row.name, row.concurrency) for row in rows}) == len(rows)
    assert {row.concurrency for row in rows} == {64, 256}
    assert {row.name for row in rows if not row.engine and not row.bare_env} == {"transformers", "vllm"}
