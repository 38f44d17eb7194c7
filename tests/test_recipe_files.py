"""Recipes are found by name wherever the library is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.recipe_files import ablation_names, find_recipe, recipe_file, recipe_names, recipe_summary, supervised_names

RECIPES = Path(__file__).parents[1] / "recipes"


def test_the_names_are_the_files_of_the_folder() -> None:
    files = [f"{path.parent.name}/{path.stem}" for path in RECIPES.glob("*/*.yaml")]
    assert sorted(recipe_names() + ablation_names() + supervised_names()) == sorted(files)
    assert "arithmetic/quickstart" in recipe_names()
    assert {name.split("/")[0] for name in ablation_names()} == {"ablations"}
    assert {name.split("/")[0] for name in supervised_names()} == {"sft"}


@pytest.mark.parametrize("name", ["arithmetic/quickstart", "arithmetic/quickstart.yaml"])
def test_a_name_finds_its_file_from_any_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_recipe(name) == recipe_file("arithmetic/quickstart")
    assert find_recipe(name).is_file()


@pytest.mark.parametrize("name", ["arithmetic/quickstart", "arithmetic/quickstart.yaml"])
def test_a_file_that_is_there_goes_before_the_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mine = Path("arithmetic/quickstart.yaml")
    mine.parent.mkdir()
    mine.write_text("mine", encoding="utf-8")
    assert find_recipe(name) == mine


def test_an_unknown_name_is_shown_the_nearest_and_all() -> None:
    with pytest.raises(ConfigError) as caught:
        find_recipe("arithmetic/quickstrat")
    assert caught.value.remedy == "Did you mean 'arithmetic/quickstart'?"
    assert all(name in caught.value.allowed for name in recipe_names())


def test_a_folder_is_no_recipe() -> None:
    with pytest.raises(ConfigError, match="an existing YAML file"):
        find_recipe(RECIPES)


@pytest.mark.parametrize("name", [*recipe_names(), *supervised_names()])
def test_every_recipe_says_in_one_line_what_it_is(name: str) -> None:
    summary = recipe_summary(recipe_file(name))
    assert summary.endswith(".")
    assert len(summary) <= 110


@pytest.mark.parametrize(("text", "summary"), [
    ("# yaml-language-server: $schema=a\n# What it is.\n# More.\n", "What it is."), ("# What it is.\nrun: 1\n", "What it is."),
    ("run: 1\n# Late.\n", ""), ("", "")])
def test_the_summary_is_the_first_comment_for_people(text: str, summary: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
    assert recipe_summary(tmp_path / "recipe.yaml") == summary
