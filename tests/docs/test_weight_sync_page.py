"""The page on weight sync names tests that are there."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT


def test_every_test_the_page_names_exists() -> None:
    named = re.findall(r"`([a-z_/]+\.py)::([a-z_]+)`", (ROOT / "docs" / "weight_sync.md").read_text(encoding="utf-8"))
    assert len(named) >= 14
    for file, function in named:
        assert f"def {function}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), (file, function)
