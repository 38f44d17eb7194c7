"""What a recipe names lies beside it; what the command line names, in the working folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.references import resolve_references


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder; the recipe lies in `recipe` beside it. Both hold the same names."""
    for folder in ("here", "recipe"):
        (tmp_path / folder / "both").mkdir(parents=True)
        (tmp_path / folder / "task.py").touch()
        (tmp_path / folder / f"only_{folder}.jsonl").touch()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def resolved(tree: object, here: Path, *overridden: str) -> object:
    return resolve_references(tree, base=here.parent / "recipe", overridden=overridden)


def test_functions_of_a_recipe_lie_beside_it(here: Path) -> None:
    tree = {"env": {"reward": {"one": "task.py:f", "two": "package.module:g"}}, "prompts": {"function": "task.py:h"}}
    task = here.parent / "recipe" / "task.py"
    assert resolved(tree, here) == {
        "env": {"reward": {"one": f"{task}:f", "two": "package.module:g"}}, "prompts": {"function": f"{task}:h"}}


@pytest.mark.parametrize("overridden", ["env.reward.one", "env.reward", "env"])
def test_functions_of_the_command_line_lie_in_the_working_folder(overridden: str, here: Path) -> None:
    tree = {"env": {"reward": {"one": "task.py:f"}}, "prompts": {"function": "task.py:f"}}
    assert resolved(tree, here, overridden) == {
        "env": {"reward": {"one": f"{here / 'task.py'}:f"}}, "prompts": {"function": f"{here.parent / 'recipe' / 'task.py'}:f"}}


def test_a_file_is_looked_for_beside_the_recipe_and_then_in_the_working_folder(here: Path) -> None:
    tree = {name: {"path": path} for name, path in {
        "both": "./both", "recipe": "only_recipe.jsonl", "here": "only_here.jsonl", "neither": "Qwen/Qwen3-0.6B"}.items()}
    recipe = here.parent / "recipe"
    assert resolved(tree, here) == {
        "both": {"path": str(recipe / "both")}, "recipe": {"path": str(recipe / "only_recipe.jsonl")},
        "here": {"path": str(here / "only_here.jsonl")}, "neither": {"path": "Qwen/Qwen3-0.6B"}}


def test_a_file_of_the_command_line_is_looked_for_in_the_working_folder_alone(here: Path) -> None:
    tree = {"model": {"path": "both"}, "prompts": {"path": "only_recipe.jsonl"}}
    assert resolved(tree, here, "model.path", "prompts") == {
        "model": {"path": str(here / "both")}, "prompts": {"path": "only_recipe.jsonl"}}


def test_the_user_s_folder_may_be_named_by_a_tilde(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here))
    assert resolved({"model": {"path": "~/both"}}, here) == {"model": {"path": str(here / "both")}}


def test_several_sections_in_a_row_are_looked_into(here: Path) -> None:
    assert resolved([{"path": "both"}, 3], here) == [{"path": str(here.parent / "recipe" / "both")}, 3]


def test_sections_may_have_any_name(here: Path) -> None:
    tree = {"sets": {"path": {"path": "both"}, "reward": {"function": "task.py:f"}}}
    recipe = here.parent / "recipe"
    assert resolved(tree, here) == {"sets": {"path": {"path": str(recipe / "both")}, "reward": {"function": f"{recipe / 'task.py'}:f"}}}


def test_arguments_are_the_user_s_own(here: Path) -> None:
    tree = {"arguments": {"path": "both", "function": "no.py:f"}}
    assert resolved(tree, here) == tree


def test_a_missing_file_of_a_function_is_refused_with_the_place_it_was_looked_for(here: Path) -> None:
    with pytest.raises(ConfigError, match=r"Looked for .*recipe/no\.py") as caught:
        resolved({"env": {"reward": {"one": "no.py:f"}}}, here)
    assert caught.value.field == "env.reward.one"
