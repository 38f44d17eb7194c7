"""`section.key=value` on the command line: one value each, put into the tree a recipe describes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from asyncrl import yaml_text
from asyncrl.errors import ConfigError
from asyncrl.settings import from_kind, kinds_of, nearest, sections_at


@dataclass(frozen=True, slots=True)
class Override:
    """One value, and where it goes."""

    path: str
    """Dotted."""
    value: Any

    @property
    def names(self) -> list[str]:
        """The parts of the path."""
        return self.path.split(".")


def parse_overrides(texts: Sequence[str]) -> list[Override]:
    """What the texts set. Raises ConfigError for one that is no `section.key=value`, and for a key given twice."""
    overrides: list[Override] = []
    for text in texts:
        path, equals, value = text.partition("=")
        if not equals or not all(path.split(".")) or path.count(".") > yaml_text.DEEPEST:
            raise ConfigError("override", value=text, allowed="section.key=value", remedy="For example trainer.learning_rate=1e-4.")
        if any(path == other.path for other in overrides):
            raise ConfigError(path, value=text, allowed="each key once", remedy="Remove all but one.")
        try:
            overrides.append(Override(path, yaml_text.read(value)))
        except yaml_text.YAMLError as error:
            raise ConfigError(path, value=value, allowed="a YAML value", remedy=f"Quote it, or mend it: {error}.") from error
    return overrides


def apply_overrides(tree: dict[str, Any], overrides: Sequence[Override], *, root: type[BaseModel]) -> list[str]:
    """Put the values into `tree`, which describes a `root`; a section before what lies in it, its kind before the rest of it.

    Another kind takes what it has in common with the one before; what it does not have goes. Gives a line for each section that
    loses settings by this. Raises ConfigError for a path through a value.
    """
    lost = []
    for override in sorted(overrides, key=lambda item: (len(item.names), item.names[-1] != "kind")):
        *parents, leaf = override.names
        node = _section(tree, parents, override=override, root=root)
        dropped: dict[str, Any] = {}
        if leaf == "kind":
            dropped = _without_place(node, kind=override.value, models=sections_at(root, parents))
            lost += _lost(override, ".".join(parents), dropped)
        elif isinstance(node.get(leaf), dict) and sections_at(root, override.names):
            kept = override.value if isinstance(override.value, dict) else {}
            lost += _lost(override, override.path, {key: value for key, value in node[leaf].items() if key not in {*kept, "kind"}})
        for key in dropped:
            del node[key]
        node[leaf] = override.value
    return lost


def _section(tree: dict[str, Any], names: Sequence[str], *, override: Override, root: type[BaseModel]) -> dict[str, Any]:
    """The mapping at this place, made where there is none."""
    node = tree
    for depth, name in enumerate(names, start=1):
        if name not in node and depth > 1 and sections_at(root, names[:depth]) and not sections_at(root, names[:depth - 1]):
            raise ConfigError(override.path, value=override.value, allowed=f"a name the recipe has: {sorted(node)}",
                              remedy=nearest(name, list(node)) or f"Give the whole of it: {'.'.join(names[:depth])}={{…}}.")
        child = node.setdefault(name, {})
        if sections_at(root, names[:depth]):
            child = node[name] = from_kind(child)
        if not isinstance(child, dict):
            raise ConfigError(override.path, value=override.value, allowed="a path through sections",
                              remedy=f"{name} is a value, not a section.")
        node = child
    return node


def _without_place(node: dict[str, Any], *, kind: Any, models: Sequence[Any]) -> dict[str, Any]:
    """Settings of a section that its present kind knows and the new one does not."""
    present, wanted = (next((model.model_fields for model in models if name in kinds_of(model)), None) for name in (node.get("kind"), kind))
    if present is None or wanted is None:
        return {}
    return {key: value for key, value in node.items() if key in present and key not in wanted}


def _lost(override: Override, section: str, settings: dict[str, Any]) -> list[str]:
    if not settings:
        return []
    return [f"{override.path} is set, so the recipe's own settings there do not apply: "
            + ", ".join(f"{section}.{key}={value}" for key, value in settings.items())]
