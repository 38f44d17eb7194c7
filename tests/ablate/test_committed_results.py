"""What is committed of the shipped ablations: of the recipes as they are, sound in itself, and quoted as it stands."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.ablate.command import read_plan

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "ablations"
PAGE = ROOT / "docs" / "ablations.md"
NAMES = sorted(path.name for path in RESULTS.iterdir())

each_name = pytest.mark.parametrize("name", NAMES)


def results_of(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name / "results.json").read_text(encoding="utf-8"))


def shown(row: dict[str, Any]) -> str:
    error = row["standard_error"]
    return f"{row['mean']:.3g}" + ("" if error is None else f" ± {error:.2g}")


def figures(text: str) -> list[str]:
    return re.findall(r"-?\d[\d.e-]* ± [\d.e+-]*\d", text)


@each_name
def test_they_are_of_the_recipe_as_it_is(name: str) -> None:
    results, plan = results_of(name), read_plan(f"ablations/{name}", out=None, quick=False)
    assert (results["ablation"], results["profile"]) == (name, "full")
    assert [(run["point"], run["seed"]) for run in results["runs"]] == [(dict(run.point), run.seed) for run in plan.runs]
    asked = plan.ablation.model_dump(mode="json", include={"recipe", "steps", "seeds", "seed_keys", "settings", "report", "curve"})
    assert {key: results[key] for key in asked} == asked
    assert results["axes"] == json.loads(json.dumps({axis: section.settings for axis, section in plan.ablation.axes.items()}))
    assert {(run["error"], run["steps"]) for run in results["runs"]} == {(None, plan.ablation.steps)}
    assert len({run["commit"] for run in results["runs"]}) == 1


@each_name
def test_means_and_differences_follow_from_the_runs(name: str) -> None:
    results = results_of(name)
    values = {(tuple(run["point"].values()), run["seed"]): run["values"] for run in results["runs"]}
    seeds = results["seeds"]
    for row in [*results["means"], *results["differences"]]:
        there = {**row["point"], row["axis"]: row["reference"]} if "axis" in row else None
        numbers = [values[tuple(row["point"].values()), seed][row["report"]]
                   - (values[tuple(there.values()), seed][row["report"]] if there else 0.0) for seed in seeds]
        assert row["seeds"] == len(seeds)
        assert row["mean"] == pytest.approx(np.mean(numbers), rel=1e-5, abs=1e-9)
        if len(seeds) > 1:
            assert row["standard_error"] == pytest.approx(np.std(numbers, ddof=1) / np.sqrt(len(seeds)), rel=1e-5, abs=1e-9)
    sizes = [len(labels) for labels in results["axes"].values()]
    points = int(np.prod(sizes))
    assert len(results["means"]) == points * len(results["report"])
    assert len(results["differences"]) == sum(points - points // size for size in sizes) * len(results["report"])


@each_name
def test_curves_have_every_step_and_end_where_the_numbers_are(name: str) -> None:
    results = results_of(name)
    for run in results["runs"]:
        assert run["curves"]["reward/total/mean"]["steps"] == list(range(1, results["steps"] + 1))
        assert run["curves"]["eval/held_out/reward/mean"]["values"][-1] == run["values"]["held-out reward"]


@each_name
def test_every_figure_of_the_page_and_the_table_is_in_the_results(name: str) -> None:
    results = results_of(name)
    known = {shown(row) for row in [*results["means"], *results["differences"]]}
    section = re.search(rf"^### `{name}`$(.*?)(?=^###? |\Z)", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert section is not None
    quoted = figures(section[1]) if len(results["seeds"]) > 1 else re.findall(r"(?<![\w.])-?\d+\.\d+", section[1])
    assert len(quoted) > 5
    assert [figure for figure in quoted if figure not in known] == []
    assert [figure for figure in figures((RESULTS / name / "table.md").read_text(encoding="utf-8")) if figure not in known] == []


@each_name
def test_tables_on_the_page_are_those_of_the_results(name: str) -> None:
    table = (RESULTS / name / "table.md").read_text(encoding="utf-8")
    section = PAGE.read_text(encoding="utf-8").split(f"### `{name}`")[1].split("\n###")[0]
    rows = [line for line in section.splitlines() if line.startswith("|") and not re.fullmatch(r"[| -]+", line)]
    assert len(rows) > 2
    assert [row for row in rows if row not in table.splitlines()] == []


@each_name
def test_the_pictures_are_there(name: str) -> None:
    pictures = {path.stem for path in (RESULTS / name).glob("*.png")}
    assert pictures == {"curves", *(re.sub(r"\W+", "_", report.lower()) for report in results_of(name)["report"])}


def test_the_readme_quotes_what_is_there() -> None:
    (row,) = [line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if "docs/ablations.md#" in line]
    known = {shown(one) for one in results_of("staleness")["differences"] if one["point"]["lag"] == "8" and one["axis"] == "correction"
             and one["point"]["correction"] == "decoupled + token TIS" and one["report"] == "held-out reward"}
    assert set(figures(row)) == known
