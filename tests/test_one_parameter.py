"""docs/one_parameter.md is what its JSON says, its JSON agrees with itself, and a new run tells the same story."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGE, TRACE = DOCS / "one_parameter.md", DOCS / "one_parameter.json"
LIMIT_S = 240


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(DOCS))
    from one_parameter import checks

    return checks


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(DOCS))
    from one_parameter import page

    return page


def committed() -> dict[str, Any]:
    return json.loads(TRACE.read_text(encoding="utf-8"))


def shape(value: Any) -> Any:
    """The names of a trace, without its numbers."""
    return {name: shape(inner) for name, inner in value.items()} if isinstance(value, dict) else None


def broken(checks: ModuleType, trace: dict[str, Any]) -> list[tuple[int, str, float]]:
    return [(check.step, check.claim, check.gap) for check in checks.checks(trace) if not check.holds]


def test_the_committed_page_is_what_the_committed_trace_renders_to(page: ModuleType) -> None:
    assert PAGE.read_text(encoding="utf-8") == page.render(committed())


def test_every_check_of_the_committed_trace_holds_and_every_step_has_one(checks: ModuleType) -> None:
    assert broken(checks, committed()) == []
    assert {check.step for check in checks.checks(committed())} == set(range(1, 13))


def test_there_are_twelve_steps_in_order_and_all_of_them_on_the_picture() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert re.findall(r"^## (\d+)\. ", text, flags=re.MULTILINE) == [str(number) for number in range(1, 13)]
    picture = text.split("```")[1]
    assert {int(number) for number in re.findall(r"\d+", picture)} == set(range(1, 13))


def test_every_link_leads_to_a_file_that_defines_the_function_beside_it() -> None:
    links = re.findall(r"\]\(([^)]+\.py)\)(?: `([\w.]+)`)?", PAGE.read_text(encoding="utf-8"))
    assert len([name for _, name in links if name]) >= 12
    for link, name in links:
        nodes: list[ast.stmt] = ast.parse((DOCS / link).read_text(encoding="utf-8")).body
        for part in filter(None, name.split(".")):
            found = [node for node in nodes if getattr(node, "name", "") == part]
            assert found, f"{link} does not define {name}"
            nodes = found[0].body


@pytest.mark.parametrize("path", [
    "1.bytes", "2.local.0", "2.master.bits", "3.contribution", "3.bf16.bits", "3.bytes", "3.state_hash", "4.recomputed_hash",
    "4.value.bits", "5.logprob.value", "5.draw", "5.seed", "5.interval.0", "6.reward", "6.rewards.0", "6.advantage.value", "7.staleness",
    "7.version", "7.master_1.bits", "8.rollout_logprob.bits", "8.weight.value", "8.plain_logprob.value", "8.age", "9.share", "9.others",
    "9.loss.value", "9.clipped", "9.largest_gap", "10.grad_norm", "10.first_moment.1.value", "10.second_moment.0.value",
    "10.learning_rate", "10.eps", "10.update", "10.master.1.bits", "11.value_bytes", "11.ordinal", "11.count", "11.bitmap_at",
    "11.own_change", "11.other_changes", "11.mode", "11.contribution.1", "12.value.1.bits", "12.logprob.value", "12.policy_version",
    "12.token", "12.state_hash"])
def test_a_wrong_number_breaks_a_check(checks: ModuleType, path: str) -> None:
    trace = committed()
    *way, last = path.split(".")
    place = functools.reduce(lambda inside, name: inside[int(name) if isinstance(inside, list) else name], way, trace["steps"])
    key = int(last) if isinstance(place, list) else last
    place[key] = wrong(place[key])
    try:
        found = broken(checks, trace)
    except AssertionError:
        return  # digits that do not name the bits beside them
    assert found


def wrong(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, str):
        return value[:-1] + ("1" if value[-1] == "0" else "0")
    return not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else value * 1.01 + 1e-3


@pytest.mark.slow
def test_a_new_run_goes_the_same_way_and_every_check_holds(checks: ModuleType, page: ModuleType, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(DOCS / "make_one_parameter.py"), str(tmp_path)], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    trace = json.loads((tmp_path / TRACE.name).read_text(encoding="utf-8"))
    assert broken(checks, trace) == []
    assert shape(trace) == shape(committed())
    assert trace["run"] == committed()["run"]
    assert (tmp_path / PAGE.name).read_text(encoding="utf-8") == page.render(trace)
    assert trace["steps"]["7"]["staleness"] == 1
    changed = trace["steps"]["11"]["bf16"]
    assert trace["steps"]["7"]["bf16_0"] == trace["steps"]["7"]["bf16_1"] == changed[0] != changed[1]
