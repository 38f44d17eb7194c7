"""A model is loaded whole or refused with what is wrong with its files, never filled up at random."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncrl.causal_lm import load_causal_lm
from asyncrl.errors import ConfigError
from asyncrl.rollout.model_files import read_facts
from asyncrl.tokenizer import Tokenizer
from tests.tiny_model import make_tiny_model

WEIGHTS = "model.safetensors"


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """The same file after `change`."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def without_a_matrix(folder: Path) -> None:
    rewritten(folder, lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.weight"))


def with_nan(folder: Path) -> None:
    rewritten(folder, lambda tensors: tensors["model.norm.weight"].fill_(float("nan")))


def cut_short(folder: Path) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[:len(whole) // 2])


def of_another_vocabulary(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 20}))


def removed(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("damage", "said"), [
    (without_a_matrix, r"not in its files.*up_proj"), (with_nan, r"NaN or infinity.*model\.norm"), (cut_short, "SafetensorError"),
    (of_another_vocabulary, r"do not fit config\.json.*embed_tokens.*\(16, 32\) in the file, \(20, 32\) wanted"),
    (removed, r"no file named model\.safetensors")])
def test_files_that_are_damaged_are_refused_with_folder_and_cause(tmp_path: Path, damage: Callable[[Path], None], said: str) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    damage(folder)
    with pytest.raises(ConfigError, match=rf"tiny.*{said}"):
        load_causal_lm(folder, dtype=torch.float32)


@pytest.mark.parametrize("tie", [True, False])
def test_a_whole_folder_is_loaded_for_evaluation(tmp_path: Path, tie: bool) -> None:
    model = load_causal_lm(make_tiny_model(tmp_path, tie=tie), dtype=torch.bfloat16)
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(("name", "text"), [("config.json", "{oops"), ("config.json", "{}"), ("generation_config.json", "[")])
def test_settings_that_cannot_be_read_are_refused_by_name(tmp_path: Path, name: str, text: str) -> None:
    folder = make_tiny_model(tmp_path)
    (folder / name).write_text(text)
    with pytest.raises(ConfigError, match=name):
        read_facts(folder)


def test_a_tokenizer_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(("config", "asked", "context_tokens"), [
    ({"max_position_embeddings": 64}, None, 64), ({"n_positions": 64}, None, 64),
    ({"text_config": {"n_positions": 64, "vocab_size": 8}}, 32, 32), ({}, 48, 48)])
def test_the_context_is_read_under_either_name_or_as_it_is_asked_for(tmp_path: Path, config: dict[str, object], asked: int | None,
                                                                    context_tokens: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 16} | config))
    assert read_facts(tmp_path, context_tokens=asked).context_tokens == context_tokens


@pytest.mark.parametrize(("config", "asked"), [({"n_positions": 64}, 65), ({}, None)])
def test_a_context_that_the_model_does_not_have_or_nobody_names_is_refused(tmp_path: Path, config: dict[str, object],
                                                                           asked: int | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 16} | config))
    with pytest.raises(ConfigError) as refused:
        read_facts(tmp_path, context_tokens=asked)
    assert refused.value.field == "engine.context_tokens"
