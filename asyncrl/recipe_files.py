"""The recipes that come with the library: package data of `asyncrl`, found by name."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path

from asyncrl.errors import ConfigError

_SUFFIX = ".yaml"
_ABLATIONS = "ablations"
"""The folder of the files that `asyncrl ablate` takes; they are grids over recipes, not recipes."""
_SUPERVISED = "sft"
"""The folder of what `asyncrl sft` takes."""
_MODELINE = "# yaml-language-server:"
"""For editors; what a recipe is about stands in the line after it."""


def recipes_folder() -> Path:
    """Where they lie: inside the package where it was installed, beside it in a checkout."""
    package = Path(__file__).parent
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parent / "recipes"


def recipe_names() -> list[str]:
    """`arithmetic/quickstart`, …"""
    return [name for name in _names() if name.split("/")[0] not in (_ABLATIONS, _SUPERVISED)]


def supervised_names() -> list[str]:
    """`sft/arithmetic`, …"""
    return [name for name in _names() if name.startswith(f"{_SUPERVISED}/")]


def ablation_names() -> list[str]:
    """`ablations/staleness`, …"""
    return [name for name in _names() if name.startswith(f"{_ABLATIONS}/")]


def _names() -> list[str]:
    folder = recipes_folder()
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.glob(f"*/*{_SUFFIX}"))


def recipe_file(name: str) -> Path:
    """Where the recipe of this name lies, if there is one."""
    return recipes_folder() / f"{name}{_SUFFIX}"


def find_recipe(name_or_path: str | Path, *, names: Sequence[str] | None = None) -> Path:
    """The file: what lies at the path, with or without `.yaml`; else the recipe of that name.

    Known are `names`, those for `train` unless given. Raises ConfigError with the nearest name, and all of them.
    """
    for path in (Path(name_or_path), Path(f"{name_or_path}{_SUFFIX}")):
        if os.path.isfile(path):
            return path
    names, name = recipe_names() if names is None else names, str(name_or_path).removesuffix(_SUFFIX)
    if name in names:
        return recipe_file(name)
    near = difflib.get_close_matches(name, names, n=1)
    raise ConfigError("recipe", value=str(name_or_path), allowed=f"an existing YAML file, or one of {', '.join(names)}",
                      remedy=f"Did you mean {near[0]!r}?" if near else "Check the path; `asyncrl recipes` says what each one is.")


def recipe_summary(path: Path) -> str:
    """What the first comment of a recipe says."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith(_MODELINE):
            return line.removeprefix("#").strip()
    return ""
