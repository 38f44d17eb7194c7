"""Exports: what transformers loads again, in the dtype and the files asked for, whole or not at all."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from asyncrl.channel import Request
from asyncrl.errors import CheckpointError, ConfigError, NonFiniteError
from asyncrl.paths import RunPaths
from asyncrl.train import export, lora
from asyncrl.train.attention import PACKED
from asyncrl.train.rank import RankTrainer
from asyncrl.train.trainer import Trainer
from tests.train.families import make_family
from tests.train.train_data import inline_rank, random_batch, step_on


def export_to(rank: RankTrainer, folder: Path, **form: object) -> Path:
    rank.export(Request("export", body={"folder": str(folder), "form": form}))
    return folder


def logits_of(folder: Path) -> Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder)(torch.arange(12)[None]).logits


def stored(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return tensors


@pytest.mark.parametrize("model", ["tiny", "untied"])
def test_an_export_is_a_model_folder_with_the_trained_weights(model: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    source = request.getfixturevalue(model)
    rank = inline_rank(source, tmp_path / "store")
    step_on(rank, random_batch(0))
    rank.export(Request("export", body={"folder": str(tmp_path / "export")}))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        rank._lm.set_attn_implementation("sdpa")
        assert torch.equal(exported(tokens).logits, rank._lm(tokens).logits)
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (tmp_path / "export" / name).read_bytes() == (source / name).read_bytes()
    names = {name for name, _ in exported.named_parameters()}
    assert ("lm_head.weight" in names) == (model == "untied")


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "deepseek-v3, keys from a latent", "phi3"])
@pytest.mark.parametrize("form", [{}, {"max_shard_bytes": 6_000}])
def test_an_export_has_the_names_of_its_source_however_transformers_holds_them(family: str, form: dict[str, int], tmp_path: Path) -> None:
    source = make_family(family, tmp_path / "model")
    folder = export_to(inline_rank(source, tmp_path / "store"), tmp_path / "export", **form)
    found, expected = stored(folder), stored(source)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    if form:
        index = json.loads((folder / export.INDEX).read_text(encoding="utf-8"))
        assert index["weight_map"].keys() == expected.keys()
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    assert torch.equal(logits_of(folder), logits_of(source))


def test_an_export_keeps_the_dtype_of_its_source(tiny: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    rank = inline_rank(tmp_path / "half", tmp_path / "store")
    assert {parameter.dtype for parameter in rank._lm.parameters()} == {torch.float32}
    rank.export(Request("export", body={"folder": str(tmp_path / "export")}))
    assert {parameter.dtype for parameter in AutoModelForCausalLM.from_pretrained(tmp_path / "export").parameters()} == {torch.bfloat16}


def test_a_weight_beyond_the_dtype_of_the_source_is_not_exported(tiny: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float16).save_pretrained(tmp_path / "half")
    rank = inline_rank(tmp_path / "half", tmp_path / "store")
    with torch.no_grad():
        rank._lm.model.norm.weight[0] = 1e5
    with pytest.raises(NonFiniteError, match=r"model\.norm\.weight holds a value that is not finite as torch\.float16"):
        rank.export(Request("export", body={"folder": str(tmp_path / "export")}))


@pytest.mark.parametrize("model", ["tiny", "untied"])
@pytest.mark.parametrize("most_bytes", [1, 6_000, 20_000])
def test_shards_hold_every_weight_once_and_no_more_than_asked_for(model: str, most_bytes: int, tmp_path: Path,
                                                                  request: pytest.FixtureRequest) -> None:
    rank = inline_rank(request.getfixturevalue(model), tmp_path / "store")
    step_on(rank, random_batch(0))
    one, many = export_to(rank, tmp_path / "one"), export_to(rank, tmp_path / "many", max_shard_bytes=most_bytes)
    assert torch.equal(logits_of(many), logits_of(one))
    files = sorted(many.glob("*.safetensors"))
    index = json.loads((many / export.INDEX).read_text(encoding="utf-8"))
    assert [file.name for file in files] == sorted(set(index["weight_map"].values()))
    assert all(file.name == f"model-{n:05d}-of-{len(files):05d}.safetensors" for n, file in enumerate(files, start=1))
    for file in files:
        with safe_open(file, "pt") as opened:
            sizes = {name: opened.get_tensor(name).nbytes for name in opened.keys()}  # noqa: SIM118
        assert sum(sizes.values()) <= most_bytes or len(sizes) == 1
        assert {name for name, place in index["weight_map"].items() if place == file.name} == set(sizes)
    whole = stored(one)
    assert whole.keys() == stored(many).keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    assert ("lm_head.weight" in whole) == (model == "untied")


def test_no_more_than_a_shard_and_a_tensor_is_held_at_once(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most_bytes, held, largest = 20_000, 0, 0
    gather, save_file = lora.whole, export.save_file

    def gathered(tensor: Tensor) -> Tensor:
        nonlocal held, largest
        held += tensor.nbytes
        largest = max(largest, held)
        return gather(tensor)

    def saved(shard: dict[str, Tensor], file: Path, **settings: object) -> None:
        nonlocal held
        held -= sum(tensor.nbytes for tensor in shard.values())
        save_file(shard, file, **settings)

    rank = inline_rank(tiny, tmp_path / "store")
    monkeypatch.setattr(lora, "whole", gathered)
    monkeypatch.setattr(export, "save_file", saved)
    export_to(rank, tmp_path / "export", max_shard_bytes=most_bytes)
    assert held == 0
    assert 0 < largest <= most_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("source_dtype", ["float32", "bfloat16"])
def test_weights_and_config_have_the_dtype_asked_for(dtype: str, source_dtype: str, tiny: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(tiny, dtype=getattr(torch, source_dtype)).save_pretrained(tmp_path / "source")
    (tmp_path / "source" / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    rank = inline_rank(tmp_path / "source", tmp_path / "store")
    step_on(rank, random_batch(0))
    folder = export_to(rank, tmp_path / "export", dtype=dtype)
    assert (folder / "chat_template.jinja").read_text(encoding="utf-8") == "{{ messages }}"
    wanted = getattr(torch, dtype)
    assert {tensor.dtype for tensor in stored(folder).values()} == {wanted}
    assert json.loads((folder / "config.json").read_text(encoding="utf-8"))["dtype"] == dtype
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert {parameter.dtype for parameter in loaded.parameters()} == {wanted}
    for name, parameter in rank._lm.named_parameters():
        assert torch.equal(stored(folder)[name], parameter.detach().to(wanted))


def test_parts_of_a_model_have_the_dtype_too_and_a_config_without_one_gets_it() -> None:
    config = {"text_config": {"dtype": "bfloat16", "layers": [1]}, "torch_dtype": "bfloat16", "dtype": None}
    assert export._with_dtype(config, "float16") == {"text_config": {"dtype": "float16", "layers": [1]}, "torch_dtype": "float16",
                                                     "dtype": None}


def test_an_older_export_goes_whole_with_its_shards_and_its_index_and_notes_stay(tiny: Path, tmp_path: Path) -> None:
    """A single file beside an index that names others, or the other way round, would load the wrong weights."""
    rank, target = inline_rank(tiny, tmp_path / "store"), tmp_path / "export"
    for form in ({"max_shard_bytes": 6_000}, {}, {"max_shard_bytes": 20_000}):
        step_on(rank, random_batch(0))
        export_to(rank, target, **form)
        (target / "NOTES.md").write_text("mine", encoding="utf-8")
        with torch.no_grad():
            rank._lm.set_attn_implementation("sdpa")
            expected = rank._lm(torch.arange(12)[None]).logits
            rank._lm.set_attn_implementation(PACKED)
        assert torch.equal(logits_of(target), expected)
        assert (target / export.INDEX).exists() == bool(form)
        assert (target / "NOTES.md").read_text(encoding="utf-8") == "mine"
    assert sorted(os.listdir(tmp_path)) == ["export", "store"]


def test_what_is_no_model_folder_is_not_replaced(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "notes.txt").write_text("months of work", encoding="utf-8")
    for target in (tmp_path / "results", tmp_path / "results" / "notes.txt"):
        with pytest.raises(ConfigError, match="a new folder, an empty one, or a model folder"):
            export_to(inline_rank(tiny, tmp_path / "store"), target)
    assert (tmp_path / "results" / "notes.txt").read_text(encoding="utf-8") == "months of work"


def test_a_failure_half_way_leaves_the_older_export(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = inline_rank(tiny, tmp_path / "store")
    before = {file.name: file.read_bytes() for file in export_to(rank, tmp_path / "export").iterdir()}
    step_on(rank, random_batch(0))
    save_file = export.save_file

    def failing(shard: dict[str, Tensor], file: Path, **settings: object) -> None:
        if "00002" in file.name:
            raise export.SafetensorError("I/O error: no space left")
        save_file(shard, file, **settings)

    monkeypatch.setattr(export, "save_file", failing)
    with pytest.raises(CheckpointError, match="cannot be written"):
        export_to(rank, tmp_path / "export", max_shard_bytes=6_000)
    assert {file.name: file.read_bytes() for file in (tmp_path / "export").iterdir()} == before
    assert sorted(os.listdir(tmp_path)) == ["export", "store"]


def test_the_trainer_exports_in_the_form_asked_for(tiny: Path, tmp_path: Path) -> None:
    async def main() -> None:
        paths = RunPaths(root=tmp_path / "run", shared=tmp_path / "shared")
        paths.make()
        trainer = Trainer(tiny, correction="token_tis", learning_rate=1e-2, processes=0)
        await trainer.start(paths)
        try:
            await trainer.export(tmp_path / "export", dtype="bfloat16", max_shard_bytes=6_000)
            for form, field in (({"dtype": "int8"}, "dtype"), ({"max_shard_bytes": 0}, "max_shard_bytes")):
                with pytest.raises(ConfigError) as refused:
                    await trainer.export(tmp_path / "other", **form)
                assert refused.value.field == field
        finally:
            await trainer.close()

    asyncio.run(main())
    assert len(list((tmp_path / "export").glob("*.safetensors"))) > 1
    assert {tensor.dtype for tensor in stored(tmp_path / "export").values()} == {torch.bfloat16}
    assert not (tmp_path / "other").exists()
