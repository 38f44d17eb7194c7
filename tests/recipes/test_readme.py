"""The README tells the truth of what lies beside it."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_script_shown_is_the_script_in_recipes() -> None:
    (shown,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert shown == (ROOT / "recipes" / "minimal.py").read_text(encoding="utf-8")


def test_every_link_leads_to_a_file() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def quickstart() -> dict:
    return json.loads((ROOT / "benchmarks" / "results" / "quickstart.json").read_text(encoding="utf-8"))


def test_the_figures_of_the_quickstart_are_those_of_its_json() -> None:
    result = quickstart()
    runs = [run["summary"] for run in result["runs"]]
    before = f"{100 * min(run['eval_before'] for run in runs):.0f}–{100 * max(run['eval_before'] for run in runs):.0f}%"
    after = f"{100 * min(run['eval_after'] for run in runs):.0f}–{100 * max(run['eval_after'] for run in runs):.0f}%"
    seconds = f"{result['rl_wall_s']['median']:.0f} s in the median of {len(runs)} seeds, {result['rl_wall_s']['worst']:.0f} s in the worst"
    assert before in README
    assert after in README
    assert seconds in README
    assert all(run["reward_first"] <= 0.35 and run["reward_last"] >= 0.70 and run["ledger_closed"] for run in runs)
    assert re.findall(r"(\w+) seeds", README) == [str(len(runs))] * 3


def test_the_times_of_the_two_commands_are_those_of_their_json() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "commands.json").read_text(encoding="utf-8"))
    assert [row["command"] for row in result["commands"]] == ["make demo", "make test"]
    for row in result["commands"]:
        assert f"`{row['command']}` {row['wall_s']:.0f} s" in README


def test_the_race_is_that_of_its_json() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "end_to_end.json").read_text(encoding="utf-8"))
    for row, task, key in (("quickstart, answers", "quickstart", "seconds_to_threshold"),
                           ("long tail, up to", "long_tail", "seconds_to_threshold"), ("start-up, quickstart", "quickstart", "start_up_s")):
        (shown,) = re.findall(rf"^\| {row}[^|]*\|(.*)\|$", README, flags=re.MULTILINE)
        assert [cell.strip() for cell in shown.split("|")] == [
            f"{result[task]['summary'][name][key]:.1f}" for name in ("trl", "sync", "async", "vllm")]


def test_the_figures_of_smollm2_are_those_of_its_json() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "smollm2.json").read_text(encoding="utf-8"))
    edges, summary = result["edges"], result["summary"]
    for part in ("form", "sum"):
        assert f"{100 * edges[part]['first']:.0f}% → {100 * edges[part]['last']:.0f}%" in README
    assert f"{summary['eval_before']:.2f} → {summary['eval_after']:.2f} of 2" in README
    assert f"{summary['wall_s'] / 60:.0f} minutes on two cores" in README


def test_the_picture_shows_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    runs = quickstart()["runs"]
    (axes,) = runpy.run_path(str(ROOT / "benchmarks" / "quickstart.py"))["draw"](runs).axes
    shown = [line for line in axes.get_lines() if not line.get_label().startswith("_")]
    assert [list(line.get_ydata()) for line in shown] == [run["rewards"] for run in runs]
    assert len({line.get_color() for line in shown}) == len(runs)
