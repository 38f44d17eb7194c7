"""A model is a folder or an id, for engines and trainer alike; what is neither is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.model_folder import model_folder
from asyncrl.rollout.inline_engine import InlineEngine
from asyncrl.train.trainer import Trainer
from tests.tiny_model import make_tiny_model


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert model_folder(make_tiny_model(tmp_path)) == tmp_path


@pytest.mark.parametrize("model", ["no-such-folder", "a/b/c", ""])
def test_what_is_neither_folder_nor_id_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="an id looks like Qwen"):
        model_folder(model)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a folder that holds config"):
        model_folder(tmp_path)


def test_an_id_is_fetched_for_engine_and_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_model(tmp_path)
    asked: list[str] = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **settings: asked.append(name) or str(folder))
    assert Trainer("someone/tiny", learning_rate=1e-3).model == folder
    InlineEngine("someone/tiny")
    assert asked == ["someone/tiny", "someone/tiny"]


def test_an_id_that_cannot_be_fetched_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(name: str, **settings: object) -> str:
        raise ConnectionError("the hub is away")

    monkeypatch.setattr("huggingface_hub.snapshot_download", away)
    with pytest.raises(ConfigError, match="the hub is away"):
        Trainer("someone/tiny", learning_rate=1e-3)
