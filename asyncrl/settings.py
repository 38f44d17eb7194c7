"""What every section of settings is: strict, frozen, and refused in words a user can act on. Needs no torch."""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError, model_validator
from pydantic_core import CoreSchema, core_schema

from asyncrl.errors import ConfigError

Seconds = Annotated[float, Field(gt=0, le=30 * 86_400)]
"""A time limit. 30 days are longer than any job lives; far beyond them the clocks of sockets and signals overflow."""
SEEDS = 2**32
"""How many there are of what a setting may say; NumPy's oldest generator takes no more than 32 bits, and vLLM seeds it."""
Seed = Annotated[int, Field(ge=0, lt=SEEDS)]
"""Of random generators."""
Workers = Annotated[int, Field(ge=1, le=1024)]
"""Processes or threads of one part on one machine."""


def from_kind(value: Any) -> Any:
    """`{kind: token_tis}` for `"token_tis"`."""
    return {"kind": value} if isinstance(value, str) else value


@dataclass(frozen=True, slots=True)
class Tagged:
    """Makes a union of sections one that `kind` chooses from; a kind whose other settings all have defaults may stand alone."""

    read: Callable[[Any], Any] = from_kind
    """Makes a section of what may stand for one."""
    names: Callable[[], tuple[str, ...]] = tuple
    """What else may stand alone than a kind, for those who complete what is typed."""

    def __get_pydantic_core_schema__(self, union: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        chosen = handler.generate_schema(Annotated[union, Field(discriminator="kind")])
        return core_schema.no_info_before_validator_function(self.read, chosen)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        union = handler(schema)
        kinds = {kind: handler.resolve_ref_schema({"$ref": place}) for kind, place in union["discriminator"]["mapping"].items()}
        alone = [kind for kind, section in kinds.items() if set(section.get("required", ())) <= {"kind"}]
        alone += [name for name in self.names() if name not in alone]
        for section in kinds.values():
            section["required"] = sorted({*section.get("required", ()), "kind"})
        return {"anyOf": [{"enum": alone}, union]} if alone else union


TAGGED = Tagged()
"""`Annotated[ThisConfig | ThatConfig, TAGGED]`"""


class Section(BaseModel):
    """Settings of one part: frozen; an unknown key is an error. A number is a number: neither text nor true, and finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _lists_are_tuples(cls, given: Any) -> Any:
        """YAML and JSON write lists; what is frozen holds tuples."""
        if not isinstance(given, Mapping):
            return given
        return {name: tuple(value) if isinstance(value, list) and name in cls.model_fields
                and _has(cls.model_fields[name].annotation, tuple) else value for name, value in given.items()}


S = TypeVar("S", bound=BaseModel)

_NO_SECTION = ("model_type", "model_attributes_type")
"""What pydantic calls a plain value where a section should stand."""


def validated(model: type[S], tree: Any, *, name: str = "") -> S:
    """The settings a plain tree describes. Raises ConfigError with the field and, for an unknown one, its nearest neighbour."""
    _require_64_bits(tree, field=name)
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise explain(error, model, name=name) from error


def refuse_unread(section: Section, names: Iterable[str], *, where: str, beside: str, value: object) -> None:
    """Raise ConfigError for the first of these fields that is not at its default, which `beside = value` leaves without effect."""
    for name in names:
        given = getattr(section, name)
        if given != (default := type(section).model_fields[name].default):
            raise ConfigError(f"{where}.{name}, {beside}", value=(given, value), allowed=f"the default {default!r}: nothing reads it then",
                              remedy=f"Remove {where}.{name}, or change {beside}.")


def require_pattern(text: str, *, field: str, allowed: str = "a regular expression") -> None:
    """Raise ConfigError unless the text is a regular expression."""
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:  # of a repetition beyond 2^32, of brackets a thousand deep
        raise ConfigError(field, value=text, allowed=allowed, remedy=f"It cannot be read: {error}.") from None


def explain(error: ValidationError, root: type[BaseModel], *, name: str = "") -> ConfigError:
    """The first thing to mend. An unknown key goes before a missing one: the one is often the other, misspelt.

    `name` is what a user calls the whole of `root`, empty for a file.
    """
    problems = error.errors()
    first = next((problem for problem in problems if problem["type"] == "extra_forbidden"), problems[0])
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        names, _ = _place(first["loc"], root)
        return cause.moved(names[-1], ".".join(names)) if len(names) > 1 else cause
    if first["type"] == "extra_forbidden":
        *parents, key = first["loc"]
        names, models = _place(parents, root)
        known = sorted({name for model in models for name in model.model_fields})
        return ConfigError(_dotted(name, *names, str(key)), value=first["input"], allowed=f"one of the known keys {known}",
                           remedy=_whereabouts(str(key), [*names], known, root=root, name=name))
    names, _ = _place(first["loc"], root)
    within = [problem for problem in problems if _place(problem["loc"], root)[0][:len(names)] == names]
    first = max(within, key=lambda problem: len(_place(problem["loc"], root)[0]))  # of the alternatives, the one that was meant
    names, models = _place(first["loc"], root)
    field, value = _dotted(name, *names), first["input"]
    if first["type"].startswith("union_tag") or (callable(value) and len(models) > 1):
        kinds = [kind for model in models for kind in kinds_of(model)]
        given = value.get("kind", "nothing") if isinstance(value, dict) else value
        return ConfigError(f"{field}.kind", value=given, allowed=f"one of {kinds}", remedy=nearest(str(given), kinds) or "Choose one.")
    here = [problem for problem in problems if _place(problem["loc"], root)[0] == names]
    is_missing, others = first["type"] == "missing", len(problems) - len(within)
    allowed = "a section: its settings by name" if first["type"] in _NO_SECTION else _alternatives([problem["msg"] for problem in here])
    return ConfigError(field, value="nothing" if is_missing else value, allowed=allowed,
                       remedy=("Set it." if is_missing else "Change it.") + (f" Settings to mend beside it: {others}." if others else ""))


def nearest(name: str, known: Sequence[str]) -> str:
    """`Did you mean 'trainer'?`, or nothing."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {near[0]!r}?" if near else ""


def _whereabouts(key: str, parents: list[str], known: Sequence[str], *, root: type[BaseModel], name: str) -> str:
    """What to write for a key that is not known where it stands: another kind's, one of another section, or one misspelt or shortened."""
    for model in sections_at(root, parents):
        if key in model.model_fields and (kinds := kinds_of(model)):
            return f"It goes with {_dotted(name, *parents, 'kind')}={kinds[0]}."
    places = [_dotted(name, section, key) for section in root.model_fields
              if any(key in model.model_fields for model in sections_at(root, [section]))]
    if places:
        return f"Did you mean {' or '.join(map(repr, places))}?"
    initials = [other for other in known if "".join(word[0] for word in other.split("_")) == key]
    return nearest(key, known) or (f"Did you mean {initials[0]!r}?" if initials else "Remove it.")


def sections_at(root: type[BaseModel], names: Sequence[str]) -> list[Any]:
    """The sections that may stand at this place, of every kind; none where there is a value, or nothing."""
    models: list[Any] = [root]
    named = False
    for name in names:
        if named:
            named = False
            continue
        annotations = _annotations(models, name)
        models = [member for annotation in annotations for member in members_of(annotation)]
        named = bool(models) and any(_has(annotation, dict, list, tuple) for annotation in annotations)
    return [] if named else models


def kinds_of(model: Any) -> tuple[Any, ...]:
    """The values of `kind` that choose this section."""
    return get_args(getattr(model.model_fields.get("kind"), "annotation", None))


def members_of(annotation: Any) -> list[Any]:
    """The sections that may stand in a field with this annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [member for argument in get_args(annotation) for member in members_of(argument)]


def _require_64_bits(node: Any, *, field: str) -> None:
    """A larger integer fits neither arrays nor the messages between processes."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            _require_64_bits(value, field=_dotted(field, str(key)))
    elif isinstance(node, (list, tuple)):
        for index, value in enumerate(node):
            _require_64_bits(value, field=_dotted(field, str(index)))
    elif isinstance(node, int) and not -2**63 <= node < 2**63:
        raise ConfigError(field, value=node, allowed="an integer of 64 bits", remedy="Choose a smaller one.")


def _dotted(*names: str) -> str:
    return ".".join(filter(None, names))


def _alternatives(messages: Sequence[str]) -> str:
    """What each alternative of a field asks for, as one sentence."""
    first, *rest = dict.fromkeys(messages)
    return " or ".join([first, *(message.removeprefix("Input should be ") for message in rest)])


def _place(location: Sequence[int | str], root: type[BaseModel]) -> tuple[list[str], list[Any]]:
    """The names a user writes, and the sections that may stand there.

    In pydantic's location the kind follows the name of a union of sections, a label the name of another union, and the user's own
    name, or a number, that of several sections.
    """
    names: list[str] = []
    models: list[Any] = [root]
    labelled = named = False
    for part in location:
        if named:
            names.append(str(part))
            named = False
        elif len(models) > 1:
            models = [model for model in models if part in kinds_of(model)]
        elif labelled:
            labelled = False
        else:
            names.append(str(part))
            annotations = _annotations(models, part)
            models = [member for annotation in annotations for member in members_of(annotation)]
            named = bool(models) and any(_has(annotation, dict, list, tuple) for annotation in annotations)
            labelled = not models and any(_is_choice(annotation) for annotation in annotations)
    return names, models


def _annotations(models: Sequence[Any], name: int | str) -> list[Any]:
    return [model.model_fields[str(name)].annotation for model in models if str(name) in model.model_fields]


def _has(annotation: Any, *containers: type) -> bool:
    """Whether a value of one of these types may stand there."""
    return get_origin(annotation) in containers or (_is_union(annotation) and any(_has(part, *containers) for part in get_args(annotation)))


def _is_choice(annotation: Any) -> bool:
    """Whether values of more than one type may stand there, None aside."""
    return _is_union(annotation) and len(set(get_args(annotation)) - {type(None)}) > 1


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)
