"""Names that become a part of a metric's name, and of a setting's place."""

from __future__ import annotations

import re

from asyncrl.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_OF_SETS = "eval/"


def check_name(name: str, *, field: str) -> None:
    """Raise ConfigError for a name that would not be one part of a metric's name, or of an override's."""
    if not _NAME.fullmatch(name):
        raise ConfigError(field, value=name, allowed="names of letters, digits, - and _", remedy="Rename it.")


def own_source(set_name: str) -> str:
    """The source of the prompts of a held-out set that has an environment of its own."""
    return f"{_OF_SETS}{set_name}"


def check_source(source: str) -> None:
    """Raise ConfigError when a prompt to train on names a source as if it were of a held-out set: that one's rewards would judge it."""
    if source.startswith(_OF_SETS):
        raise ConfigError("prompts.source", value=source, allowed=f"sources that do not begin with {_OF_SETS!r}", remedy="Rename it.")
