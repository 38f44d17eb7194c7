"""What a benchmark ran on, for its JSON."""

from __future__ import annotations

from pathlib import Path

from asyncrl.ablate import origin

ROOT = Path(__file__).resolve().parents[1]


def machine() -> dict[str, object]:
    """Processor, cores, memory and the versions that matter."""
    return origin.machine() | origin.versions()


def commit() -> str | None:
    """The commit the benchmark ran at, with + when tracked files were changed; None outside a checkout."""
    return origin.commit()
