"""What the pages show holds: links lead somewhere, commands and settings are accepted, code compiles, names exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

import asyncrl
from asyncrl import cli, yaml_text
from asyncrl.config import RunConfig, load_config
from asyncrl.recipe_files import recipe_names
from asyncrl.settings import validated
from tests.docs.pages import PAGES, ROOT, blocks, commands, prose

RECIPE = ROOT / "recipes" / "arithmetic" / "vllm.yaml"
"""What a part shown is put into: vLLM takes most."""

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_is_in_the_table_of_the_readme() -> None:
    table = (ROOT / "README.md").read_text(encoding="utf-8").split("## Documentation")[1]
    assert sorted(re.findall(r"^\| \[\w+\.md\]\(docs/(\w+\.md)\) \|", table, flags=re.MULTILINE)) == sorted(
        page.name for page in PAGES if page.parent == ROOT / "docs")


@each_page
def test_every_command_is_one_that_the_command_line_takes(page: Path) -> None:
    for arguments in commands(page):
        options = cli._parsed(arguments)
        if options.command.takes_settings and options.recipe in recipe_names():
            load_config(options.recipe, options.settings)


@each_page
def test_every_block_of_python_compiles_and_names_what_there_is(page: Path) -> None:
    for shown in blocks(page, "python"):
        text = re.sub(r",\s*\.\.\.\)", ")", shown)  # and so on
        compile(text, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "asyncrl":
                assert hasattr(asyncrl, node.attr), node.attr


@each_page
def test_every_block_of_yaml_is_a_part_of_a_recipe(page: Path) -> None:
    for text in blocks(page, "yaml"):
        for part in alternatives(text):
            assert part, text
            tree = yaml_text.read(RECIPE.read_text(encoding="utf-8"))
            sections = {name: value for name, value in part.items() if name in RunConfig.model_fields}
            rest = {name: value for name, value in part.items() if name not in sections}
            if rest:
                sections["prompts"] = {"kind": "jsonl", "path": "data.jsonl"} | rest
            validated(RunConfig, tree | sections)


def alternatives(text: str) -> Iterator[dict[str, Any]]:
    """A block that gives a section twice shows two ways."""
    lines: list[str] = []
    seen: set[str] = set()
    for line in text.splitlines(keepends=True):
        key = re.match(r"([a-z_]+):", line)
        if key and key[1] in seen:
            yield yaml_text.read("".join(lines))
            lines, seen = [], set()
        if key:
            seen.add(key[1])
        lines.append(line)
    yield yaml_text.read("".join(lines))


def settings_below(section: type[BaseModel], path: str = "") -> Iterator[str]:
    """Every dotted name of a setting, of each kind."""
    for name, field in section.model_fields.items():
        yield f"{path}{name}"
        for inner in sections_in(field.annotation):
            yield from settings_below(inner, f"{path}{name}.")


def sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from sections_in(argument)


@pytest.mark.parametrize("page", [page for page in PAGES if page.name in ("README.md", "start.md", "concepts.md", "checkpoints.md")],
                         ids=lambda page: page.name)
def test_every_setting_named_in_the_text_is_one(page: Path) -> None:
    known = set(settings_below(RunConfig))
    named = [name for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)", prose(page)) if name.split(".")[0] in RunConfig.model_fields]
    unknown = [name for name in named if name not in known and not hasattr(asyncrl.Run, name.removeprefix("run."))]
    assert [name for name in unknown if name not in ("run.index", "run.notes")] == []


def test_every_reason_that_something_is_dropped_for_is_explained() -> None:
    givers = {"_discard", "abandoned", "drop_all", "given_up"}
    reasons = {constant.value for path in (ROOT / "asyncrl").rglob("*.py") for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
               if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in givers
               for argument in call.args for constant in ast.walk(argument)
               if isinstance(constant, ast.Constant) and isinstance(constant.value, str)}
    explained = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8").split("| dropped for |")[1],
                           flags=re.MULTILINE)
    assert len(reasons) >= 5
    assert sorted(explained) == sorted(reasons)


def test_every_metric_is_on_a_page() -> None:
    """Names that the code gives as they are; those of `correction/` stand in a table without that prefix."""
    shown = "".join((ROOT / "docs" / page).read_text(encoding="utf-8") for page in ("metrics.md", "evaluation.md", "correction.md"))
    stages = "reward|staleness|buffer|rollout|train|trainer|engine|weights|probe|prompts|eval"
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "asyncrl").rglob("*.py"))
    names = set(re.findall(rf'"((?:{stages})/[a-z_/]+/(?:sum|mean|max|min|last|frac))"', code))
    assert len(names) > 40
    assert {name for name in names if name not in shown} == set()
