"""What every section of settings is: strict, frozen, and refused in words a user can act on. Needs no torch."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from asyncrl.errors import ConfigError


class Section(BaseModel):
    """Settings of one part: frozen; an unknown key is an error, and so is a number that is not finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


S = TypeVar("S", bound=BaseModel)

_NO_SECTION = ("model_type", "model_attributes_type")
"""What pydantic calls a plain value where a section should stand."""


def validated(model: type[S], tree: Any, *, name: str = "") -> S:
    """The settings a plain tree describes. Raises ConfigError with the field and, for an unknown one, its nearest neighbour."""
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise explain(error, model, name=name) from error


def from_kind(value: Any) -> Any:
    """`"token_tis"` for `{kind: token_tis}`."""
    return {"kind": value} if isinstance(value, str) else value


def explain(error: ValidationError, root: type[BaseModel], *, name: str = "") -> ConfigError:
    """The first thing to mend. An unknown key goes before a missing one: the one is often the other, misspelt.

    `name` is what a user calls the whole of `root`, empty for a file.
    """
    problems = error.errors()
    first = next((problem for problem in problems if problem["type"] == "extra_forbidden"), problems[0])
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return cause
    if first["type"] == "extra_forbidden":
        *parents, key = first["loc"]
        names, models = _place(parents, root)
        known = sorted({name for model in models for name in model.model_fields})
        return ConfigError(_dotted(name, *names, str(key)), value=first["input"], allowed=f"one of the known keys {known}",
                           remedy=_nearest(str(key), known) or "Remove it.")
    names, models = _place(first["loc"], root)
    field, value = _dotted(name, *names), first["input"]
    if first["type"].startswith("union_tag") or (callable(value) and len(models) > 1):
        kinds = [kind for model in models for kind in kinds_of(model)]
        given = value.get("kind") if isinstance(value, dict) else value
        return ConfigError(f"{field}.kind", value=given, allowed=f"one of {kinds}", remedy=_nearest(str(given), kinds) or "Choose one.")
    is_missing, others = first["type"] == "missing", len(problems) - 1
    allowed = "a section: its settings by name" if first["type"] in _NO_SECTION else first["msg"]
    return ConfigError(field, value="nothing" if is_missing else value, allowed=allowed,
                       remedy=("Set it." if is_missing else "Change it.") + (f" Settings to mend beside it: {others}." if others else ""))


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {near[0]!r}?" if near else ""


def _dotted(*names: str) -> str:
    return ".".join(filter(None, names))


def _place(location: Sequence[int | str], root: type[BaseModel]) -> tuple[list[str], list[Any]]:
    """The names a user writes, and the sections that may stand there. In pydantic's location the kind follows the name of a union."""
    names: list[str] = []
    models: list[Any] = [root]
    for part in location:
        if len(models) > 1:
            models = [model for model in models if part in kinds_of(model)]
            continue
        names.append(str(part))
        annotations = [model.model_fields[str(part)].annotation for model in models if str(part) in model.model_fields]
        models = [member for annotation in annotations for member in members_of(annotation)]
    return names, models


def kinds_of(model: Any) -> tuple[Any, ...]:
    """The values of `kind` that choose this section."""
    annotation = getattr(model.model_fields.get("kind"), "annotation", None)
    return getattr(annotation, "__args__", ())


def members_of(annotation: Any) -> list[Any]:
    """The sections that may stand in a field with this annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [member for argument in getattr(annotation, "__args__", ()) for member in members_of(argument)]
