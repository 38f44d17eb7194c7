"""The pages of the documentation, their code blocks, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_COMMAND = re.compile(r"^\s*(?:\S*/)?asyncrl (.*)$", re.MULTILINE)


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language, as they stand; "" for those without."""
    return [text for found, text in _BLOCK.findall(page.read_text(encoding="utf-8")) if found == language]


def block_with(page: str, first_line: str) -> str:
    """The block of a page under `docs` that begins with this line."""
    found = [text for _, text in _BLOCK.findall((ROOT / "docs" / page).read_text(encoding="utf-8")) if text.startswith(first_line)]
    assert len(found) == 1, f"{page} has {len(found)} blocks that begin with {first_line!r}"
    return found[0]


def commands(page: Path) -> Iterator[list[str]]:
    """The arguments of each `asyncrl ...` in a code block, comments apart."""
    for language in ("", "bash", "sh"):
        for text in blocks(page, language):
            for line in _COMMAND.findall(text):
                yield shlex.split(line, comments=True)


def prose(page: Path) -> str:
    """The page without its code blocks."""
    return _BLOCK.sub("", page.read_text(encoding="utf-8"))
