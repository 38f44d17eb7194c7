"""docs/planner.md against the code: every number of its tables is what the planner yields, and no case is left out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from asyncrl.plan.step import plan_step
from tests.parity import planner_oracles
from tests.parity.test_planner_oracles import CASES
from tests.plan.scene import spread

PAGE = (Path(__file__).parents[2] / "docs" / "planner.md").read_text(encoding="utf-8")
ROWS = {name: (predicted, reference)
        for name, predicted, reference in re.findall(r"^\| `([^`]+)` \| ([^|]+) \| ([^|]+) \|", PAGE, re.MULTILINE)}
SHOWN = [case for case in CASES if case["status"] != "invariant"]


def text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {number:.4g}" for name, number in value.items())
    return ", ".join(f"{number:.4g}" for number in value) if isinstance(value, list) else f"{value:.4g}"


@pytest.mark.parametrize("case", SHOWN, ids=lambda case: case["name"])
def test_the_page_shows_what_the_planner_says(case: dict[str, Any]) -> None:
    got, expected = planner_oracles.evaluate(case["name"], case["inputs"]), case["expected"]
    wanted = text({name: got[name] for name in expected} if isinstance(expected, dict) else got)
    reference = text(expected) if not isinstance(expected, list) or isinstance(got, list) else f"{expected[0]:.4g}–{expected[1]:.4g}"
    assert ROWS[case["name"]] == (wanted, reference)


def test_no_row_is_of_a_case_that_is_gone() -> None:
    assert set(ROWS) == {case["name"] for case in SHOWN}


def test_the_corrected_shapes_are_those_of_the_page() -> None:
    plan = plan_step(spread())
    colocated, one_step, asynchronous = (round(plan.shapes[name].total_s) for name in ("colocated", "one_step", "async"))
    assert f"colocated {colocated} s, one-step {one_step} s and async {asynchronous} s" in PAGE
