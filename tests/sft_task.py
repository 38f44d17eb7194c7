"""Rows, and a model, for supervised runs in tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from tests.tiny_model import make_tiny_model


def model(folder: Path, seed: int = 0) -> None:
    """Two layers, sixteen characters."""
    make_tiny_model(folder, seed=seed)


def sums(seed: int = 0, largest: int = 5) -> list[tuple[str, str]]:
    """A list, to go through in epochs."""
    return [(f"{left}+{right}=", str(left + right + seed)) for left in range(largest) for right in range(largest)]


def endless(seed: int = 0) -> Iterator[tuple[str, str]]:
    """The same without an end."""
    return itertools.cycle(sums())


def broken(seed: int = 0) -> list[tuple[str, str]]:
    """The second row is no row."""
    return [*sums()[:1], ("a prompt alone",)]  # type: ignore[list-item]
