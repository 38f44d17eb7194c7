"""The first steps of a seeded run against the recorded curve: what a step computes has not changed."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from benchmarks import golden_curve
from benchmarks.golden_curve import COMPARED_STEPS, OTHERS, STEPS, TOLERANCES, curve, largest_gaps


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    return json.loads(golden_curve.RESULT.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the runs here, which share the model."""
    return tmp_path_factory.mktemp("golden")


def test_the_recorded_curve_rises(recorded: dict[str, Any]) -> None:
    rewards = [step["reward"] for step in recorded["curve"]]
    assert len(rewards) == STEPS
    assert mean(rewards[-10:]) > mean(rewards[:10]) + 0.5
    assert recorded["curve"][-1]["entropy"] < recorded["curve"][0]["entropy"]


def test_the_tolerances_are_a_hundred_times_what_rounding_does(recorded: dict[str, Any]) -> None:
    assert recorded["gaps"].keys() == OTHERS.keys()
    for gaps in recorded["gaps"].values():
        for column, gap in gaps[str(COMPARED_STEPS)].items():
            assert gap <= TOLERANCES[column] / 100, column


@pytest.mark.slow
def test_the_first_steps_are_those_recorded(recorded: dict[str, Any], folder: Path) -> None:
    gaps = largest_gaps(curve(COMPARED_STEPS, folder=folder), recorded["curve"][:COMPARED_STEPS])
    print("largest deviations", gaps)
    beyond = {column: gap for column, gap in gaps.items() if gap > TOLERANCES[column]}
    assert not beyond, f"recorded on {recorded['machine']}; all gaps: {gaps}"


@pytest.mark.slow
def test_a_hundredth_more_learning_rate_is_seen(recorded: dict[str, Any], folder: Path) -> None:
    steps = 3
    gaps = largest_gaps(curve(steps, folder=folder, name="faster", settings=("trainer.learning_rate=6.06e-4",)), recorded["curve"][:steps])
    print("largest deviations at 1.01 times the learning rate", gaps)
    assert all(gaps[column] > 5 * TOLERANCES[column] for column in ("loss", "grad_norm", "entropy", "kl")), gaps


def test_a_gap_is_the_largest_of_a_column_in_shares_of_its_largest_value() -> None:
    theirs = [dict.fromkeys(golden_curve.COLUMNS, value) for value in (1.0, -4.0)]
    ours = [dict.fromkeys(golden_curve.COLUMNS, value) for value in (1.5, -4.1)]
    assert largest_gaps(ours, theirs) == pytest.approx(dict.fromkeys(golden_curve.COLUMNS, 0.125))
