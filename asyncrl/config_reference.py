"""docs/configuration.md, made from the settings themselves: `python -m asyncrl.config_reference > docs/configuration.md`."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from asyncrl import yaml_text
from asyncrl.config import RunConfig
from asyncrl.config_schema import field_docs
from asyncrl.settings import kinds_of, members_of

_INTRODUCTION = """# Configuration

Made from the settings by `make reference`; a test compares the two. `asyncrl schema` prints the same as a JSON schema,
by which editors complete and check: a recipe's first line names it, `# yaml-language-server: $schema=../schema.json`.

A recipe is a YAML mapping of the sections below. On the command line `section.key=value` replaces one value, which is YAML too; a key
is given once. `engine.kind=inline` keeps the settings that both kinds have and says which ones go. Where a kind needs nothing else it may
stand for its section: `correction: token_tis`. So may the name of a preset: `correction: areal/decoupled`.

Unknown keys, text where a number should stand, values out of range and pairs that cannot work together are refused before anything
starts, with what is allowed. `asyncrl train RECIPE --dry-run` prints the resolved configuration and what follows from it.

Functions are `file.py:name`, the file beside the recipe, or `module:name`. Files and model folders are looked for beside the recipe and
then in the working folder. What the command line names lies in the working folder alone.
"""

_NUMBERS = {int: "integer", float: "number", str: "text", bool: "true or false", Any: "anything"}
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def reference() -> str:
    """The page."""
    return "\n".join([_INTRODUCTION, *_Page().sections(RunConfig, path="", level=2)])


class _Page:
    """What is written so far: a section that stands in several places is told where it stands first."""

    def __init__(self) -> None:
        self._told: dict[tuple[Any, ...], str] = {}

    def sections(self, parent: type[BaseModel], *, path: str, level: int) -> Iterator[str]:
        """A heading for each section in `parent`, with the kinds that may stand there, and the sections in those."""
        for name, field in parent.model_fields.items():
            members, place = tuple(members_of(field.annotation)), _place(path, name, field)
            if members and members not in self._told:
                self._told[members] = place
                yield f"{'#' * level} {place}\n\n{field_docs(parent)[name]}\n"
                for member in members:
                    yield from self._kind(member, path=place)
                for member in members:
                    yield from self.sections(member, path=place, level=3)

    def _kind(self, section: type[BaseModel], *, path: str) -> Iterator[str]:
        kind = f"**`kind: {kinds_of(section)[0]}`** " if kinds_of(section) else ""
        yield f"{kind}{inspect.getdoc(section)}\n"
        docs = field_docs(section)
        cells = [(f"`{name}`", self._type(field, place=_place(path, name, field)), _default(field), _range(field), docs[name])
                 for name, field in section.model_fields.items() if name != "kind"]
        if cells:
            rows = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in cells]
            yield "\n".join(["| key | type | default | range | meaning |", "|---|---|---|---|---|", *rows, ""])

    def _type(self, field: FieldInfo, *, place: str) -> str:
        members = tuple(members_of(field.annotation))
        if not members:
            return _type(field.annotation)
        link = f"[section](#{self._told.get(members, place).lower().replace('.', '')})"
        return {dict: f"{link} by name", tuple: f"list of such a {link}"}.get(get_origin(field.annotation), link)


def _place(path: str, name: str, field: FieldInfo) -> str:
    """Where a user writes it; NAME is his own."""
    return ".".join(filter(None, (path, name, "NAME" if get_origin(field.annotation) is dict and members_of(field.annotation) else "")))


def _type(annotation: Any) -> str:
    """Of a value, in words."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if hasattr(annotation, "__metadata__"):
        return _type(annotation.__origin__)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in parts)
    if origin is dict:
        return f"{_type(parts[1])} by name"
    if origin is tuple:
        return f"list of {_type(parts[0])}" if parts[-1] is Ellipsis else f"{len(parts)} × {_type(parts[0])}"
    if origin in (Union, types.UnionType):
        return " or ".join(_type(part) for part in parts if part is not type(None))
    return _NUMBERS[annotation]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    value = field.get_default(call_default_factory=True)
    if value is None or isinstance(value, bool):
        return f"`{yaml_text.write(value).split()[0]}`"
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
                yield f"{sign} {getattr(item, name):,}".replace(",", " ").removesuffix(".0")


if __name__ == "__main__":
    print(reference(), end="")
