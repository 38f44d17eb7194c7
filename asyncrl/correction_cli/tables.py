"""Rows of words in columns."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], *, right: bool = False) -> str:
    """Columns as wide as their widest word, two spaces between; all but the first to the right where they are numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(f"{cell:{'>' if right and place else '<'}{width}}"
                               for place, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip() for row in rows)
