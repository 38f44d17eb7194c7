"""What is made from the settings is up to date, says something of each of them, and lets editors check a recipe as the library does."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel

from asyncrl import yaml_text
from asyncrl.config import RunConfig
from asyncrl.config_reference import reference
from asyncrl.config_schema import field_docs, recipe_schema
from asyncrl.recipe_files import recipe_file, recipe_names
from asyncrl.settings import members_of

ROOT = Path(__file__).parents[1]
QUICKSTART = yaml_text.read(recipe_file("arithmetic/quickstart").read_text(encoding="utf-8"))


def sections(root: type[BaseModel]) -> list[type[BaseModel]]:
    """Every section there is, once."""
    found: dict[type[BaseModel], None] = {}
    left = [root]
    while left:
        section = left.pop()
        if section not in found:
            found[section] = None
            left += [member for field in section.model_fields.values() for member in members_of(field.annotation)]
    return list(found)


SECTIONS = sections(RunConfig)


@pytest.fixture(scope="module")
def validator() -> Any:
    schema = json.loads(recipe_schema())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_setting_says_what_it_is(section: type[BaseModel]) -> None:
    assert section.__doc__
    docs = field_docs(section)
    assert [name for name in section.model_fields if name != "kind" and name not in docs] == []
    assert all(text.endswith((".", "…")) for text in docs.values())


def test_the_page_is_what_is_made_now() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == reference(), "make reference"


def test_the_schema_is_what_is_made_now() -> None:
    assert (ROOT / "recipes" / "schema.json").read_text(encoding="utf-8") == recipe_schema(), "make reference"


def test_the_page_has_every_key() -> None:
    page = reference()
    for section in SECTIONS[1:]:
        for name in section.model_fields:
            assert name == "kind" or f"| `{name}` |" in page or f"## {name}" in page


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_names_its_schema_and_keeps_to_it(name: str, validator: Any) -> None:
    path = recipe_file(name)
    text = path.read_text(encoding="utf-8")
    modeline = text.splitlines()[0]
    assert modeline.startswith("# yaml-language-server: $schema=")
    assert (path.parent / modeline.split("=")[1]).resolve() == (ROOT / "recipes" / "schema.json").resolve()
    assert [error.message for error in validator.iter_errors(yaml_text.read(text))] == []


def changed(place: str, value: Any) -> dict[str, Any]:
    tree = copy.deepcopy(QUICKSTART)
    *parents, leaf = place.split(".")
    node = tree
    for name in parents:
        node = node.setdefault(name, {})
    node[leaf] = value
    return tree


@pytest.mark.parametrize(("place", "value"), [
    ("trainer.learnig_rate", 1e-3), ("trane", {}), ("trainer.learning_rate", "1e-3"), ("run.steps", True), ("run.steps", 0),
    ("engine.kind", "vlm"), ("engine", {"threads": 1}), ("engine", "vlm"), ("trainer.schedule", "linear"), ("loss", {"clip_low": 0.1}),
    ("prompts", {"function": "task.py:sums"}), ("buffer.window", 0), ("sampling.stop", "x"), ("env.timeout_s", 0)])
def test_editors_refuse_what_the_library_refuses(place: str, value: Any, validator: Any) -> None:
    assert not validator.is_valid(changed(place, value))


@pytest.mark.parametrize(("place", "value"), [
    ("engine", "inline"), ("loss", "ppo"), ("correction", None), ("trainer.schedule", "constant"), ("buffer.policy", "soft"),
    ("buffer.window", None), ("buffer.depth_groups", 40), ("trainer.betas", [0.8, 0.9]), ("env.reward", {"a": "b.py:c"})])
def test_editors_take_what_the_library_takes(place: str, value: Any, validator: Any) -> None:
    assert validator.is_valid(changed(place, value))


def test_editors_are_told_what_a_setting_is() -> None:
    properties = json.loads(recipe_schema())["$defs"]["BufferConfig"]["properties"]
    assert properties["group_size"]["description"].startswith("Rollouts of one prompt")
