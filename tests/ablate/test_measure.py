"""The numbers of one run, from the rows it wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.ablate.config import Measure
from asyncrl.ablate.measure import Curve, measure, shortened

ROWS = [{"eval_version": 0, "eval/step/last": 0, "eval/held_out/reward/mean": 0.25},
        {"trainer_step": 1, "reward/total/mean": 0.5, "correction/ess_raw/frac": 1.0},
        {"trainer_step": 2, "reward/total/mean": None, "correction/ess_raw/frac": 0.5},
        {"trainer_step": 3, "reward/total/mean": 1.0},
        {"trainer_step": 4, "reward/total/mean": 0.75, "correction/ess_raw/frac": 0.25},
        {"eval_version": 4, "eval/step/last": 4, "eval/held_out/reward/mean": 0.75}]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS) + '{"trainer_step": 5, "rew', encoding="utf-8")
    return tmp_path


def test_curves_hold_what_is_there_and_finite_and_evaluations_stand_at_their_step(run: Path) -> None:
    measured = measure(run, report={"held-out": Measure(metric="eval/held_out/reward/mean")}, curve="reward/total/mean")
    assert measured.steps == 4
    assert measured.curves == {"reward/total/mean": Curve((1, 3, 4), (0.5, 1.0, 0.75)),
                               "eval/held_out/reward/mean": Curve((0, 4), (0.25, 0.75))}


@pytest.mark.parametrize(("stat", "last_steps", "value"), [
    ("mean", None, 0.75), ("mean", 2, 0.875), ("last", None, 0.75), ("max", None, 1.0), ("min", 2, 0.75), ("min", 99, 0.5)])
def test_a_number_is_made_of_the_steps_that_are_asked_for(stat: str, last_steps: int | None, value: float, run: Path) -> None:
    report = {"reward": Measure.model_validate({"metric": "reward/total/mean", "stat": stat, "last_steps": last_steps})}
    assert measure(run, report=report, curve="reward/total/mean").values == {"reward": value}


def test_last_steps_are_those_of_the_run_not_those_that_have_the_metric(run: Path) -> None:
    report = {"ess": Measure(metric="correction/ess_raw/frac", last_steps=2)}
    assert measure(run, report=report, curve="reward/total/mean").values == {"ess": 0.25}


def test_what_no_row_has_is_none(run: Path, tmp_path: Path) -> None:
    report = {"kl": Measure(metric="correction/kl_k3/mean")}
    assert measure(run, report=report, curve="reward/total/mean").values == {"kl": None}
    assert measure(tmp_path / "nowhere", report=report, curve="reward/total/mean").steps == 0


def test_numbers_keep_the_digits_of_a_float32() -> None:
    assert shortened(0.123456789) == 0.1234568
    assert shortened(1.23456789e-13) == 1.234568e-13
