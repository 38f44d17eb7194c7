"""Rows of a JSONL file that another process writes, cuts and replaces meanwhile."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TAIL_BYTES = 4096
"""Of what was read, so much is compared with the file each time: a row and more, and no two runs write the same row."""

_COUNTS = ("step", "trainer_step", "version", "eval_version", "eval/step/last")
_LARGEST = 1e300


@dataclass(frozen=True, slots=True)
class News:
    """What a look at the file gave."""

    rows: tuple[dict[str, Any], ...]
    """New ones; all there are when the file is another one."""
    was_rewritten: bool = False
    """What had been read before is not what the file begins with: forget it."""
    unreadable: int = 0
    """Whole lines that are no rows."""


class Follower:
    """Reads a growing file from where it left off. A last line without its end waits until it is whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._tail = b""

    def look(self) -> News:
        """What is new. A file that is missing, or cannot be read, is an empty one."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset - len(self._tail))
                was_rewritten = file.read(len(self._tail)) != self._tail
                if was_rewritten:
                    self._offset, self._tail = 0, b""
                    file.seek(0)
                data = file.read()
        except OSError:
            was_rewritten, data = self._offset > 0, b""
            self._offset, self._tail = 0, b""
        whole = data[:data.rfind(b"\n") + 1]
        self._offset += len(whole)
        self._tail = (self._tail + whole)[-_TAIL_BYTES:]
        lines = [line for line in whole.split(b"\n") if line.strip()]
        rows = tuple(row for line in lines if (row := _row(line)) is not None)
        return News(rows, was_rewritten=was_rewritten, unreadable=len(lines) - len(rows))


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not all(isinstance(row.get(name, 0), int) for name in _COUNTS):
        return None
    return row if all(_is_number(value) for name, value in row.items() if "/" in name or name == "wall_s") else None


def _is_number(value: object) -> bool:
    """Whether a run writes such a value of a metric: a number that is finite, or null."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST)
