"""What a recipe names outside itself, made absolute: the resolved configuration means the same wherever it is read.

A recipe's functions lie beside it. Its files and model folders do too, or else in the working folder, where models are fetched to.
What the command line names lies in the working folder alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.functions import resolve_reference

_FUNCTION_KEYS = frozenset({"function", "reward", "examples", "held_out"})
_PATH_KEYS = frozenset({"path"})
_NAMED_SECTIONS = frozenset({"sets", "sources"})
"""Sections under names of the user's own, which may be those above."""
_ARGUMENTS = "arguments"
"""What lies below it is the user's own, whatever its keys are called."""


def resolve_references(tree: Any, *, base: Path, overridden: Sequence[str] = ()) -> Any:
    """The tree with every function and every file that is there made absolute.

    Args:
        base: folder of the recipe.
        overridden: dotted places that the command line set.

    Raises ConfigError for a function whose file is missing, with its field. A path that leads nowhere stays as it is: it may be the
    id of a model; who reads it refuses it otherwise.
    """
    return _Resolver(base.absolute(), frozenset(overridden)).section(tree, field="")


@dataclass(frozen=True, slots=True)
class _Resolver:
    base: Path
    overridden: frozenset[str]

    def section(self, node: Any, *, field: str) -> Any:
        if isinstance(node, list):
            return [self.section(item, field=f"{field}{number}.") for number, item in enumerate(node)]
        if not isinstance(node, dict):
            return node
        return {key: self._value(key, value, field=f"{field}{key}") for key, value in node.items()}

    def _value(self, key: Any, value: Any, *, field: str) -> Any:
        if key == _ARGUMENTS:
            return value
        if key in _NAMED_SECTIONS and isinstance(value, dict):
            return {name: self.section(section, field=f"{field}.{name}.") for name, section in value.items()}
        if key in _FUNCTION_KEYS:
            return self._functions(value, field=field)
        if key in _PATH_KEYS and isinstance(value, str):
            return self._path(value, field=field)
        return self.section(value, field=f"{field}.")

    def _functions(self, value: Any, *, field: str) -> Any:
        """One reference, or several by name; what is neither is left for the model to refuse."""
        if isinstance(value, dict):
            return {name: self._functions(reference, field=f"{field}.{name}") for name, reference in value.items()}
        return resolve_reference(value, base=self._places(field)[0], field=field) if isinstance(value, str) else value

    def _path(self, value: str, *, field: str) -> str:
        there = (path for place in self._places(field) if _is_there(path := place / os.path.expanduser(value)))
        return str(next(there, value))

    def _places(self, field: str) -> tuple[Path, ...]:
        names = field.split(".")
        if any(".".join(names[:depth]) in self.overridden for depth in range(1, len(names) + 1)):
            return (Path.cwd(),)
        return (self.base, Path.cwd())


def _is_there(path: Path) -> bool:
    """Whether something is; also where this user may not look: whoever reads it says so. A name no system takes leads nowhere."""
    try:
        return path.exists()
    except PermissionError:
        return True
    except OSError:
        return False
