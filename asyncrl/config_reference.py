"""docs/configuration.md, made from the settings themselves: `python -m asyncrl.config_reference > docs/configuration.md`."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from asyncrl.config import RunConfig
from asyncrl.config_schema import field_docs
from asyncrl.settings import kinds_of, members_of

_INTRODUCTION = """# Configuration

Made from the settings by `python -m asyncrl.config_reference`; a test compares the two. `asyncrl schema` prints the same as a JSON schema,
by which editors complete and check: a recipe's first line names it, `# yaml-language-server: $schema=../schema.json`.

A recipe is a YAML mapping of the sections below. On the command line `section.key=value` replaces one value, which is YAML too; a key
is given once. `engine.kind=inline` keeps the settings that both kinds have and says which ones go. Where a kind needs nothing else it may
stand for its section: `correction: token_tis`.

Unknown keys, text where a number should stand, values out of range and pairs that cannot work together are refused before anything
starts, with what is allowed. `asyncrl train RECIPE --dry-run` prints the resolved configuration and what follows from it.

Functions are `file.py:name`, the file beside the recipe, or `module:name`. Files and model folders are looked for beside the recipe and
then in the working folder. What the command line names lies in the working folder alone.
"""

_NUMBERS = {int: "integer", float: "number", str: "text", bool: "true or false", Any: "anything"}
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def reference() -> str:
    """The page."""
    docs = field_docs(RunConfig)
    sections = [f"## {name}\n\n{docs[name]}\n\n" + "\n".join(_section(name, field.annotation))
                for name, field in RunConfig.model_fields.items()]
    return "\n".join([_INTRODUCTION, *sections])


def _section(path: str, annotation: Any) -> Iterator[str]:
    """Each kind that may stand at `path`: what it is, its settings, and the sections in it."""
    members = members_of(annotation)
    for member in members:
        kind = f"kind: {kinds_of(member)[0]}" if kinds_of(member) else ""
        if len(members) > 1 or "." in path:
            yield f"### {path}{f' — {kind}' if kind else ''}\n"
        yield f"{inspect.getdoc(member)}\n"
        yield from _table(member)
        for name, field in member.model_fields.items():
            if members_of(field.annotation):
                below = f"{path}.{name}" + (".NAME" if get_origin(field.annotation) is dict else "")
                yield from _section(below, field.annotation)


def _table(section: type[BaseModel]) -> Iterator[str]:
    docs = field_docs(section)
    cells = [(f"`{name}`", _type(field.annotation), _default(field), _range(field), docs.get(name, "").replace("|", "\\|"))
             for name, field in section.model_fields.items() if name != "kind"]
    rows = [f"| {' | '.join(row)} |" for row in cells]
    if rows:
        yield "\n".join(["| key | type | default | range | meaning |", "|---|---|---|---|---|", *rows, ""])


def _type(annotation: Any) -> str:
    """In words, sections as such: what they hold has tables of its own."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if hasattr(annotation, "__metadata__"):
        return _type(annotation.__origin__)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in parts)
    if origin is dict:
        return "sections by name" if members_of(annotation) else f"{_type(parts[1])} by name"
    if origin is tuple:
        return f"list of {_type(parts[0])}" if parts[-1] is Ellipsis else f"{len(parts)} × {_type(parts[0])}"
    if members_of(annotation):
        return "section"
    if origin in (Union, types.UnionType):
        return " or ".join(_type(part) for part in parts if part is not type(None))
    return _NUMBERS[annotation]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "`null`"
    if isinstance(value, BaseModel):
        return f"`{getattr(value, 'kind', '')}`".replace("``", "its defaults")
    return f"`{list(value) if isinstance(value, tuple) else value}`"


def _range(field: FieldInfo) -> str:
    return ", ".join(dict.fromkeys(_bounds([*field.metadata, *_inner_metadata(field.annotation)])))


def _inner_metadata(annotation: Any) -> list[Any]:
    """Bounds written inside a union or a tuple."""
    return [*getattr(annotation, "__metadata__", ()), *(item for part in get_args(annotation) for item in _inner_metadata(part))]


def _bounds(metadata: list[Any]) -> Iterator[str]:
    for item in metadata:
        if isinstance(item, FieldInfo):
            yield from _bounds(item.metadata)
        for name, sign in _BOUNDS.items():
            if hasattr(item, name):
                yield f"{sign} {getattr(item, name):,}".replace(",", " ")


if __name__ == "__main__":
    print(reference(), end="")
