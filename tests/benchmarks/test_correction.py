"""The arithmetic of the benchmark of correction; what it measures is measured, not tested."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark_script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, imported as it is when run: from its own folder."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("correction")


def test_the_data_are_the_same_each_time_and_of_the_size_they_are_said_to_have(benchmark_script: ModuleType) -> None:
    arrays, lengths = benchmark_script.draw()
    again, _ = benchmark_script.draw()
    assert all((arrays[name] == again[name]).all() for name in arrays)
    assert len(lengths) == 64
    assert lengths.max() == benchmark_script.MAX_TOKENS
    assert lengths.sum() == pytest.approx(128 * 1024, rel=0.01)
    assert all(len(values) == lengths.sum() for values in arrays.values())


def test_weighing_counts_for_the_core_and_not_for_the_diagnostics(benchmark_script: ModuleType) -> None:
    found = benchmark_script.summarised({"reading": [0.001, 0.001, 0.003], "core": [0.010, 0.008, 0.010],
                                         "diagnostics": [0.052, 0.052, 0.042], "weighing": [0.002, 0.002, 0.002]})
    assert (found["core_over_reading"], found["diagnostics_over_core"]) == (10.0, 5.0)
    assert (found["core_over_reading_best"], found["diagnostics_over_core_best"]) == (8.0, 5.0)
    assert (found["diagnostics_ms"], found["diagnostics_ms_best"]) == (50.0, 40.0)


def test_ratios_are_ours_over_theirs(benchmark_script: ModuleType) -> None:
    found = benchmark_script.ratios({"asyncrl": {"ms": 1.0, "peak_mb": 5.0}, "verl": {"ms": 20.0, "peak_mb": 50.0}})
    assert found == {"verl_time": 0.05, "verl_memory": 0.1}


def test_the_core_gives_the_gradient_of_the_loss(benchmark_script: ModuleType) -> None:
    arrays, lengths = benchmark_script.draw()
    tensors = {name: torch.from_numpy(values) for name, values in benchmark_script.with_offsets(arrays, lengths).items()}
    found = benchmark_script.core(tensors, {})
    assert found["loss"].isfinite()
    assert found["gradient"].count_nonzero() > lengths.sum() / 2


def test_the_page_quotes_what_was_measured() -> None:
    found = json.loads((BENCHMARKS / "results" / "correction.json").read_text(encoding="utf-8"))
    page = (BENCHMARKS.parent / "docs" / "correction.md").read_text(encoding="utf-8")
    contenders, ratios, alone = found["contenders"], found["ratios"], found["ours"]["cpu"]
    assert f"{found['tokens']:,} tokens" in page
    assert f"| asyncrl, packed | {contenders['asyncrl']['ms']:.1f} | {contenders['asyncrl']['peak_mb']:.1f} |" in page
    for row, name in (("AReaL 1.0.4, packed", "areal"), ("TRL 1.16.0", "trl"), ("verl 0.9.1", "verl")):
        assert (f"| {row} | {contenders[name]['ms']:.1f} | {contenders[name]['peak_mb']:.1f} | {ratios[f'{name}_time']:.2f} | "
                f"{ratios[f'{name}_memory']:.2f} |") in page
    for name in ("core_over_reading", "diagnostics_over_core"):
        assert f"{alone[name]:.1f} times" in page
        assert f"({alone[f'{name}_best']:.1f}" in page
