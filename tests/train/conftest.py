"""Tiny models, made once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied embeddings."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tied")


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head of its own."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "untied", tie=False)
