"""The runs of an ablation: every combination of points with every seed, each a whole configuration that was checked."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl import yaml_text
from asyncrl.ablate.config import Ablation
from asyncrl.config import RunConfig, parse_config, read_tree
from asyncrl.errors import ConfigError
from asyncrl.functions import source_file
from asyncrl.overrides import Override, apply_overrides
from asyncrl.recipe_files import find_recipe
from asyncrl.references import resolve_references

RUNS = "runs"
"""Where the runs lie in the folder of an ablation, and the models they share."""
_MOST_NAME_BYTES = 80
"""Of a run's name before its key; file systems take 255."""
MOST_RUNS = 10_000
"""Of one ablation; a minute each, they take a week."""

Point = Mapping[str, str]
"""The label of each axis."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One point with one seed."""

    point: Point
    seed: int
    config: RunConfig
    """Resolved; it writes to `folder`."""
    key: str
    """Changes with every setting but the run's own place, and with the source of the functions it names, wherever that lies."""

    @property
    def folder(self) -> Path:
        """Where it writes."""
        return Path(self.config.run.folder) / self.config.run.name

    def __str__(self) -> str:
        return f"{told(self.point)}, seed {self.seed}"


def told(point: Point) -> str:
    """`lag 4, correction token_tis`"""
    return ", ".join(f"{axis} {label}" for axis, label in point.items())


def points_of(ablation: Ablation, *, among: Sequence[str] | None = None) -> list[Point]:
    """Every combination of the labels of all axes, or of those `among`, the last axis fastest."""
    axes = list(ablation.axes if among is None else among)
    return [dict(zip(axes, labels, strict=True)) for labels in itertools.product(*(ablation.labels(axis) for axis in axes))]


def plan(ablation: Ablation, *, file: Path, folder: Path) -> list[PlannedRun]:
    """Every run, seeds outermost, so that what has been run at any time covers the grid as evenly as it can.

    Args:
        file: that the ablation was read from; what its settings name lies beside it.
        folder: of the ablation.

    Raises ConfigError for more runs than anyone waits for, for a point that no run could start with, and for points that are the same run.
    """
    _require_few(ablation)
    recipe = _beside(ablation.recipe, file) or find_recipe(ablation.recipe)
    tree = resolve_references(read_tree(recipe), base=recipe.parent)
    runs = [_planned(ablation, point, seed, tree=tree, base=file.parent, folder=folder)
            for seed, point in itertools.product(ablation.seeds, points_of(ablation))]
    first: dict[str, PlannedRun] = {}
    for run in runs:
        if (other := first.setdefault(run.key, run)) is not run:
            raise ConfigError("axes, seed_keys", value=f"{other}; {run}", allowed="points and seeds that are different runs",
                              remedy="Remove one of the two, or the axis that changes nothing.")
    return runs


def _require_few(ablation: Ablation) -> None:
    """Counted, not made: a few long axes have more combinations than a memory holds."""
    sizes = {axis: len(ablation.labels(axis)) for axis in ablation.axes}
    if (runs := math.prod(sizes.values()) * len(ablation.seeds)) > MOST_RUNS:
        product = " × ".join([*(f"{size} of {axis}" for axis, size in sizes.items()), f"{len(ablation.seeds)} seeds"])
        raise ConfigError("axes, seeds", value=runs, allowed=f"at most {MOST_RUNS} runs",
                          remedy=f"They are {product}; take points out, or make several ablations of it.")


def _planned(ablation: Ablation, point: Point, seed: int, *, tree: dict[str, Any], base: Path, folder: Path) -> PlannedRun:
    name = "_".join(f"{axis}-{label}" for axis, label in point.items())
    own = {"run.name": "unnamed", "run.folder": str(folder.absolute() / RUNS)} | dict.fromkeys(ablation.seed_keys, seed)
    of_point = {key: value for axis, label in point.items() for key, value in ablation.axes[axis].settings[label].items()}
    made: Any = _copied(tree)
    try:
        for settings in ({"run.steps": ablation.steps}, ablation.settings, of_point, own):
            apply_overrides(made, [_override(path, value, base=base) for path, value in settings.items()], root=RunConfig)
        config = parse_config(made, base=base)
    except ConfigError as error:
        raise ConfigError(error.field, value=error.value, allowed=error.allowed,
                          remedy=f"{error.remedy} This is at {told(point)}.") from error
    key = _key(config)
    slug = re.sub(r"[^\w.-]+", "-", f"{name}_seed-{seed}").encode()[:_MOST_NAME_BYTES].decode(errors="ignore").strip(".-")
    config = config.model_copy(update={"run": config.run.model_copy(update={"name": f"{slug}_{key[:8]}"})})
    return PlannedRun(point, seed, config, key)


def _beside(recipe: str, file: Path) -> Path | None:
    return next((path for suffix in ("", ".yaml") if os.path.isfile(path := file.parent / f"{recipe}{suffix}")), None)


def _override(path: str, value: Any, *, base: Path) -> Override:
    """The setting, with functions and files it names looked for beside the ablation."""
    if not all(path.split(".")) or path.count(".") > yaml_text.DEEPEST:
        raise ConfigError("settings", value=path, allowed="section.key", remedy="For example trainer.learning_rate.")
    tree: Any = _copied(value)
    for name in reversed(path.split(".")):
        tree = {name: tree}
    tree = resolve_references(tree, base=base)
    for name in path.split("."):
        tree = tree[name]
    return Override(path, tree)


def _copied(tree: Any) -> Any:
    """Mappings and lists made anew: overrides change them."""
    if isinstance(tree, Mapping):
        return {key: _copied(value) for key, value in tree.items()}
    return [_copied(value) for value in tree] if isinstance(tree, list | tuple) else tree


def _key(config: RunConfig) -> str:
    tree = config.model_dump(mode="json", exclude={"run": {"name", "folder"}})
    return hashlib.sha256(json.dumps(_with_sources(tree), sort_keys=True).encode()).hexdigest()[:16]


def _with_sources(tree: Any) -> Any:
    """The tree with what stands in it of a function's file in the place of where that file lies."""
    if isinstance(tree, Mapping):
        return {key: _with_sources(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_with_sources(value) for value in tree]
    if isinstance(tree, str) and ".py:" in tree and (source := source_file(tree)) is not None:
        return f"{hashlib.sha256(source.read_bytes()).hexdigest()}:{tree.rpartition(':')[2]}"
    return tree
