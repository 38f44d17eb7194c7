"""The tables of docs/correction.md say what the code has: presets, rules, losses, fields."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re

import pytest

from asyncrl.correction import Correction, rules
from asyncrl.correction.formula import rule_text
from asyncrl.correction_cli.catalogue import preset_markdown
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "correction.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    """Cells of the table rows below a heading, without the two lines of its head."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def named(cell: str) -> list[str]:
    return re.findall(r"`([\w.]+)`", cell)


LOSSES = {named(name)[0]: (formula, source) for name, formula, source in rows("Losses")}


def test_the_table_of_presets_is_the_one_the_code_makes() -> None:
    assert preset_markdown() in PAGE


@pytest.mark.parametrize("row", rows("Rejection"), ids=lambda row: row[0])
def test_a_rule_is_written_as_it_is_made_and_drops_what_the_page_says(row: list[str]) -> None:
    made, drops, _ = row
    assert rule_text(eval(made.strip("`"), {name: getattr(rules, name) for name in dir(rules)})) == drops


def test_every_rule_is_on_the_page() -> None:
    makers = {name for name, function in inspect.getmembers(rules, inspect.isfunction)
              if function.__module__ == rules.__name__ and inspect.signature(function).return_annotation == "Bounds"}
    shown = {re.match(r"`(\w+)", row[0])[1] for row in rows("Rejection")}
    assert shown == makers | {"Bounds", "SecondMoment"}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_a_function_that_cites_the_papers_of_its_row(name: str) -> None:
    home, _, function = name.rpartition(".")
    text = inspect.getdoc(getattr(importlib.import_module(f"asyncrl.correction.{home}"), function)) or ""
    module = inspect.getdoc(importlib.import_module(f"asyncrl.correction.{home}")) or ""
    for paper in re.findall(r"\d{4}\.\d{5}", LOSSES[name][1]):
        assert paper in text + module, paper


def test_every_loss_is_on_the_page() -> None:
    for home in ("losses", "sequence_losses", "catalog"):
        module = importlib.import_module(f"asyncrl.correction.{home}")
        given = {f"{home}.{name}" for name, function in inspect.getmembers(module, inspect.isfunction)
                 if function.__module__ == module.__name__ and not name.startswith("_")
                 and "inputs" in inspect.signature(function).parameters
                 and {"factor", "anchor"}.isdisjoint(inspect.signature(function).parameters)
                 and inspect.signature(function).return_annotation == "PolicyLoss"}
        assert given <= set(LOSSES), given - set(LOSSES)


def test_every_field_of_a_correction_is_on_the_page_with_its_default() -> None:
    shown = {field: default for names, default, _ in rows("Weights") for field, default in zip(
        named(names), (named(default) * 2 if len(named(default)) == 1 else named(default)) or [default] * 2, strict=False)}
    for field in dataclasses.fields(Correction):
        default = "none" if field.default in (None, ()) else f"{field.default:g}" if isinstance(field.default, float) else field.default
        assert shown[field.name] == default, field.name


def test_the_figures_quoted_of_the_ablation_are_its_own() -> None:
    table = (ROOT / "benchmarks" / "results" / "ablations" / "staleness" / "table.md").read_text(encoding="utf-8")
    by_name = {cells[0]: cells[-1] for line in table.split("held-out reward", 1)[1].split("\n\n")[1].splitlines()
               if len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 6}
    quoted = re.findall(r"\d\.\d+ ± [\d.]*\d", PAGE.split("## Which should I use")[1].split("## ")[0])
    assert quoted == [by_name[name] for name in ("decoupled + token TIS", "IcePop", "decoupled", "PPO on rollout logprobs")]


def test_every_advantage_named_is_a_function() -> None:
    for name, *_ in rows("Advantages"):
        home, _, function = named(name)[0].rpartition(".")
        assert callable(getattr(importlib.import_module(f"asyncrl.correction.{home}"), function)), name
