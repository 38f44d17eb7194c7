"""What it takes to see that a field of a recipe has an effect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.config_observers import Observer


@dataclass(frozen=True)
class Flip:
    """Another value of one field, where to look for the difference, and what else must be set, before and after."""

    value: Any
    observe: Observer
    around: tuple[tuple[str, Any], ...] = ()


def flip(value: Any, observe: Observer, **around: Any) -> Flip:
    return Flip(value, observe, tuple((path.replace("__", "."), other) for path, other in around.items()))
