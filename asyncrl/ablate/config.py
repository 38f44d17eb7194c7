"""What an ablation file may say: strict, frozen, refused in words a user can act on."""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Hashable, Iterable
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from asyncrl.config import read_tree
from asyncrl.errors import ConfigError
from asyncrl.recipe_files import ablation_names, recipe_file
from asyncrl.settings import TAGGED, Seconds, Section, Seed, nearest, validated

Scalar = bool | int | float | str | None
Name = Annotated[str, Field(min_length=1)]

_OWN = MappingProxyType({"run.name": "the ablation names its runs", "run.folder": "use --out", "run.steps": "use `steps`"})
"""Settings that the ablation itself makes, and what to do instead."""
CURVES = "curves"
"""The picture of the curve; those of the report have names of their own."""
_MOST_PICTURE_BYTES = 200
"""Of a picture's name; file systems take 255."""
_NO_TEXT = ("Cc", "Cs", "Zl", "Zp")
"""Unicode categories that no table, picture or file name can hold: control characters, halves of a pair, ends of a line."""


class Values(Section):
    """Several values of one key; with several keys each gets the same value."""

    kind: Literal["values"]
    keys: tuple[Name, ...] = Field(min_length=1)
    """Dotted keys of a recipe."""
    values: tuple[Scalar, ...] = Field(min_length=1)
    """A number, a text, true, false or null each; whole sections are points of the other kind."""

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """Of each point, by its label."""
        return {label_of(value): dict.fromkeys(self.keys, value) for value in self.values}


class Points(Section):
    """Bundles of settings that change together, each under a name."""

    kind: Literal["points"]
    points: dict[Name, dict[Name, Any]] = Field(min_length=1)
    """By name: dotted keys of a recipe, and their values."""

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """Of each point, by its label."""
        return dict(self.points)


AxisConfig = Annotated[Values | Points, TAGGED]


class Measure(Section):
    """A number of a whole run, made of a metric of its steps or evaluations."""

    metric: Name
    """A name of docs/metrics.md."""
    stat: Literal["mean", "last", "max", "min"] = "mean"
    """Over the rows that have the metric."""
    last_steps: int | None = Field(default=None, ge=1)
    """Rows of so many last steps alone; None: of all."""
    scale: Literal["linear", "log"] = "linear"
    """Of its picture."""


class Quick(Section):
    """What `--quick` has instead: fewer points, steps and seeds, to see that it all works."""

    steps: int | None = Field(default=None, ge=1)
    """None: as many as otherwise."""
    seeds: tuple[Seed, ...] | None = Field(default=None, min_length=1)
    """None: the same."""
    axes: dict[Name, Annotated[list[str], Field(min_length=1)]] = Field(default_factory=dict)
    """Labels of the points that stay; of an axis that is not named, all do."""
    settings: dict[Name, Any] = Field(default_factory=dict)
    """Over those of the ablation."""


class Ablation(Section):
    """A recipe, what varies, what is measured."""

    recipe: Name
    """A name of the library's, or a path, beside this file or in the working folder."""
    steps: int = Field(ge=1)
    """Of each run; `run.steps`."""
    seeds: tuple[Seed, ...] = Field(min_length=1)
    """A run of each point with each; differences are taken between runs of equal seed."""
    seed_keys: tuple[Name, ...] = Field(default=("run.seed",), min_length=1)
    """The keys that get the seed."""
    settings: dict[Name, Any] = Field(default_factory=dict)
    """Dotted keys over the recipe's, for every run."""
    axes: dict[Name, AxisConfig] = Field(min_length=1)
    """By name; the grid has a point for each combination."""
    report: dict[Name, Measure] = Field(min_length=1)
    """By the name tables and pictures have; the first is what differences are told of."""
    curve: Name = "reward/total/mean"
    """The metric that is drawn over steps."""
    over: str | None = None
    """The axis that pictures have from left to right; None: the first."""
    reference: dict[Name, str] = Field(default_factory=dict)
    """By axis, the label of the point that the others are compared with; of an axis that is not named, its first."""
    quick: Quick | None = None
    """The profile of `--quick`."""
    timeout_s: Seconds = 3600.0
    """A run that takes longer is ended and counts as failed."""
    keep_models: bool = False
    """Keep the model, best weights and checkpoints of each run; else its metrics, rollouts, configuration and logs alone."""

    @model_validator(mode="after")
    def _names_lead_somewhere(self) -> Ablation:
        for name, axis in self.axes.items():
            labels = [label_of(value) for value in axis.values] if isinstance(axis, Values) else list(axis.points)
            _require_distinct(f"axes.{name}", labels)
            _require_text("axes", [name])
            _require_text(f"axes.{name}", labels)
        _require_distinct("seeds", list(self.seeds))
        if self.over is not None:
            _require_known("over", self.over, self.axes)
        for axis, label in self.reference.items():
            _require_known("reference", axis, self.axes)
            _require_known(f"reference.{axis}", label, self.axes[axis].settings)
        for axis, labels in (self.quick.axes if self.quick else {}).items():
            _require_known("quick.axes", axis, self.axes)
            _require_distinct(f"quick.axes.{axis}", labels)
            known = self.axes[axis].settings
            for label in labels:
                _require_known(f"quick.axes.{axis}", label, known)
        return self

    @model_validator(mode="after")
    def _each_number_has_a_picture_of_its_own(self) -> Ablation:
        _require_text("report", self.report)
        owners = {CURVES: "the curve"}
        for report in self.report:
            name = picture_of(report)
            if not 0 < len(name.encode()) <= _MOST_PICTURE_BYTES:
                raise ConfigError("report", value=report, remedy="Its picture is called after it; choose another.",
                                  allowed=f"a name with letters or digits, of at most {_MOST_PICTURE_BYTES} bytes")
            if name in owners:
                raise ConfigError("report", value=report, allowed=f"a name whose picture, {name}.png, is not that of {owners[name]}",
                                  remedy="Names differ here by their letters, of either case, and digits alone; choose another.")
            owners[name] = repr(report)
        return self

    @model_validator(mode="after")
    def _a_key_has_one_origin(self) -> Ablation:
        origins: dict[str, str] = {}
        for name, axis in self.axes.items():
            for key in sorted({key for settings in axis.settings.values() for key in settings}):
                if key in origins:
                    raise ConfigError(f"axes.{origins[key]}, axes.{name}", value=key, allowed="a key in one axis",
                                      remedy="Points of both would set it; make one axis of them.")
                origins[key] = name
        if both := [key for key in self.seed_keys if key in origins]:
            raise ConfigError(f"axes.{origins[both[0]]}, seed_keys", value=both[0], allowed="a key in one of the two",
                              remedy="Take it out of seed_keys, or out of the axis.")
        quick = self.quick.settings if self.quick else {}
        places = {"settings": self.settings, "quick.settings": quick, "seed_keys": self.seed_keys, "axes": origins}
        for place, keys in places.items():
            for key in keys:
                _require_not_own(place, key)
                if "settings" in place and key in self.seed_keys:
                    raise ConfigError(f"{place}, seed_keys", value=key, allowed="a key in one of the two",
                                      remedy="Every run gets its seed there; take it out of one.")
        return self

    @model_validator(mode="after")
    def _what_is_set_can_be_written_down(self) -> Ablation:
        quick = self.quick.settings if self.quick else {}
        axes = {f"axes.{name}": axis.settings for name, axis in self.axes.items()}
        for place, settings in ({"settings": self.settings, "quick.settings": quick} | axes).items():
            try:
                json.dumps(settings, allow_nan=False, ensure_ascii=False).encode()
            except (TypeError, ValueError) as error:
                raise ConfigError(place, value=settings, allowed="numbers that are finite, texts, true, false, null, lists and mappings",
                                  remedy=f"results.json holds them: {error}.") from error
        return self

    def of_profile(self, *, quick: bool) -> Ablation:
        """As it will be run. Raises ConfigError for a quick profile that the file does not have."""
        if not quick:
            return self
        if self.quick is None:
            raise ConfigError("quick", value=None, allowed="a profile for --quick",
                              remedy="Add `quick:` to the file, or leave --quick out.")
        axes = {name: axis if name not in self.quick.axes
                else Points(kind="points", points={label: axis.settings[label] for label in self.quick.axes[name]})
                for name, axis in self.axes.items()}
        reference = {name: label for name, label in self.reference.items() if label in axes[name].settings}
        return self.model_copy(update={"steps": self.quick.steps or self.steps, "seeds": self.quick.seeds or self.seeds, "axes": axes,
                                       "settings": self.settings | self.quick.settings, "reference": reference})

    def labels(self, axis: str) -> list[str]:
        """Of the axis's points, in order."""
        return list(self.axes[axis].settings)

    @property
    def across(self) -> str:
        """The axis from left to right."""
        return self.over or next(iter(self.axes))

    def reference_of(self, axis: str) -> str:
        """The label the axis's other points are compared with."""
        return self.reference.get(axis) or self.labels(axis)[0]


def load_ablation(name_or_path: str | Path) -> tuple[Ablation, Path]:
    """The ablation of a file, or of the library by name, and the file. Raises ConfigError."""
    file = _find(name_or_path)
    return validated(Ablation, read_tree(file, field="ablation")), file


def label_of(value: Scalar) -> str:
    """How a value is called in tables: as it is written in YAML."""
    return value if isinstance(value, str) else json.dumps(value)


def picture_of(report: str) -> str:
    """The name of a number's picture, without its suffix."""
    return re.sub(r"[^\w]+", "_", report.lower()).strip("_")


def _find(name_or_path: str | Path) -> Path:
    for path in (Path(name_or_path), Path(f"{name_or_path}.yaml")):
        if os.path.isfile(path):  # unlike Path.is_file, also of a name that is too long for one
            return path
    names, name = ablation_names(), str(name_or_path).removesuffix(".yaml")
    if name in names:
        return recipe_file(name)
    raise ConfigError("ablation", value=str(name_or_path), allowed=f"an existing YAML file, or one of {', '.join(names)}",
                      remedy=nearest(name, names) or "Check the path; docs/ablations.md says how to write one.")


def _require_known(field: str, name: str, known: Iterable[str]) -> None:
    if name not in (names := list(known)):
        raise ConfigError(field, value=name, allowed=f"one of {names}", remedy=nearest(name, names) or "Choose one of these.")


def _require_distinct(field: str, names: Iterable[Hashable]) -> None:
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        raise ConfigError(field, value=twice[0], allowed="each once", remedy="Remove all but one.")


def _require_text(field: str, names: Iterable[str]) -> None:
    """Names that a table, a picture and a file can hold."""
    for name in names:
        if not name.strip() or any(unicodedata.category(character) in _NO_TEXT for character in name):
            raise ConfigError(field, value=name, allowed="a name that is not empty and has no control characters or ends of lines",
                              remedy="Tables and pictures show it; a value of that kind gets a name as one of `kind: points`.")


def _require_not_own(place: str, key: str) -> None:
    """A key that neither is, nor holds, nor lies in what the ablation makes; the steps may be an axis."""
    for own, instead in _OWN.items():
        if f"{key}.".startswith(f"{own}.") and (place, key) != ("axes", "run.steps"):
            raise ConfigError(place, value=key, allowed="settings of a recipe that the ablation does not make", remedy=f"{instead}.")
        if own.startswith(f"{key}."):
            raise ConfigError(place, value=key, allowed=f"not the whole section, which holds {own}: {instead}",
                              remedy=f"Write {key}.KEY for each of its settings.")
