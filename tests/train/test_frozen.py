"""Frozen parameters: no gradient, no moments, nothing published; tied names together or not at all."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.paths import RunPaths
from asyncrl.train.trainer import Trainer
from tests.tiny_moe import make_tiny_moe
from tests.train.test_checkpoint import restore, save
from tests.train.train_data import inline_rank, random_batch, step_on, weights

LAYERS = r"^model\.layers\.0\."
BOTH = ["embed_tokens", "lm_head"]


def test_frozen_parameters_keep_their_bits_and_have_no_moments(tiny: Path, tmp_path: Path) -> None:
    rank = inline_rank(tiny, tmp_path, frozen=[LAYERS], weight_decay=0.5)
    before = weights(rank)
    outcome = step_on(rank, random_batch(0))
    assert outcome.metrics.result()["train/updates/sum"] == 1
    still = {name for name, weight in weights(rank).items() if torch.equal(weight, before[name])}
    assert still == {name for name in before if name.startswith("model.layers.0.")}
    moments = {name.split("/")[1] for name in rank._trainee.optimizer.moments()}
    assert moments == set(before) - still


def test_names_are_those_of_the_loaded_model(tmp_path: Path) -> None:
    """In which all experts of a layer are one tensor; their files have a name for each."""
    moe = make_tiny_moe(tmp_path / "moe")
    rank = inline_rank(moe, tmp_path, frozen=[r"layers\.0\.mlp\.experts\.gate_up_proj"])
    still = [name for name, parameter in rank._lm.named_parameters() if not parameter.requires_grad]
    assert still == ["model.layers.0.mlp.experts.gate_up_proj"]
    with pytest.raises(ConfigError, match=r"^trainer\.frozen\.0 = .*None of \d+ names is left for it: model\."):
        inline_rank(moe, tmp_path, frozen=[r"layers\.0\.mlp\.experts\.0\.gate_proj"])


def test_the_gradient_of_the_others_is_as_without(tiny: Path, tmp_path: Path) -> None:
    """Of what lies below the frozen layer too: the gradient goes through it."""
    whole, part = inline_rank(tiny, tmp_path), inline_rank(tiny, tmp_path, frozen=[LAYERS])
    for rank in (whole, part):
        step_on(rank, random_batch(0))
    for name, moment in part._trainee.optimizer.moments().items():
        torch.testing.assert_close(moment, whole._trainee.optimizer.moments()[name], rtol=0, atol=1e-7)


def test_frozen_tied_embeddings_leave_the_layers_to_train(tiny: Path, tmp_path: Path) -> None:
    rank = inline_rank(tiny, tmp_path, frozen=BOTH)
    before = weights(rank)
    step_on(rank, random_batch(0))
    after = weights(rank)
    assert {name for name in before if torch.equal(before[name], after[name])} == {"model.embed_tokens.weight"}


@pytest.mark.parametrize(("pattern", "other"), [("lm_head", "model.embed_tokens.weight"), ("embed", "lm_head.weight")])
def test_one_name_of_a_tied_weight_is_refused_with_the_other(tiny: Path, untied: Path, tmp_path: Path, pattern: str, other: str) -> None:
    with pytest.raises(ConfigError, match=f"and {other}, or neither: they are tied") as refused:
        inline_rank(tiny, tmp_path, frozen=[pattern])
    assert refused.value.field == "trainer.frozen"
    rank = inline_rank(untied, tmp_path, frozen=[pattern])
    assert len(rank._trainee.optimizer.moments()) == 2 * (len(weights(rank)) - 1)


def test_a_head_alone_can_train(untied: Path, tmp_path: Path) -> None:
    rank = inline_rank(untied, tmp_path, frozen=["^model"])
    before = weights(rank)
    step_on(rank, random_batch(0))
    assert {name for name, weight in weights(rank).items() if not torch.equal(weight, before[name])} == {"lm_head.weight"}


@pytest.mark.parametrize(("frozen", "field", "match"), [
    ([LAYERS, "vision_tower"], "trainer.frozen.1", "'vision_tower' is not allowed: a pattern that decides over a parameter"),
    (["layers", "["], "trainer.frozen.1", "a regular expression"),
    (["a{99999999999}"], "trainer.frozen.0", "repetition number is too large"), (["(" * 2000], "trainer.frozen.0", "a regular expression"),
    (["."], "trainer.frozen", "leave something to train")])
def test_what_freezes_nothing_or_everything_is_refused(tiny: Path, tmp_path: Path, frozen: list[str], field: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match) as refused:
        inline_rank(tiny, tmp_path, frozen=frozen)
    assert refused.value.field == field


def test_frozen_parameters_are_never_published_as_changed(tiny: Path, tmp_path: Path) -> None:
    async def main() -> None:
        paths = RunPaths(root=tmp_path / "run", shared=tmp_path / "shared")
        paths.make()
        trainer = Trainer(tiny, correction="token_tis", learning_rate=1e-2, processes=0, frozen=[LAYERS])
        await trainer.start(paths)
        try:
            await trainer.publish()
            await trainer.step(random_batch(0))
            changed = {entry.name: entry.count for entry in (await trainer.publish()).tensors}
        finally:
            await trainer.close()
        assert {count for name, count in changed.items() if name.startswith("model.layers.0.")} <= {0}
        assert all(count for name, count in changed.items() if not name.startswith("model.layers.0."))

    asyncio.run(main())


def test_groups_frozen_offloaded_and_scaled_go_on_from_a_checkpoint_bit_for_bit(tiny: Path, tmp_path: Path) -> None:
    settings = {"frozen": [LAYERS], "learning_rate_groups": [{"match": "norm", "factor": 3.0}], "offload_optimizer": True,
                "learning_rate_scale": {"kind": "ess", "reference_updates": 2}, "minibatches_per_step": 2}
    rank = inline_rank(tiny, tmp_path / "store", **settings)
    for version in range(2):
        step_on(rank, random_batch(version, version=version))
    save(rank, tmp_path / "checkpoint", version=2)
    resumed = inline_rank(tiny, tmp_path / "store", **settings)
    restore(resumed, tmp_path / "checkpoint")
    ours, theirs = (step_on(each, random_batch(2, version=2)).metrics.result() for each in (rank, resumed))
    for name in ("learning_rate_scale", "sequence_ess", "grad_norm"):
        assert ours[f"train/{name}/last"] == theirs[f"train/{name}/last"]
    assert 0 < ours["train/learning_rate_scale/last"] <= 1
    assert all(torch.equal(tensor, resumed._tensors()[name]) for name, tensor in rank._tensors().items())
    assert rank._trainee.optimizer.updates == resumed._trainee.optimizer.updates == 6


def test_a_checkpoint_of_other_frozen_parameters_is_refused_with_the_setting(tiny: Path, tmp_path: Path) -> None:
    whole, part = inline_rank(tiny, tmp_path / "store"), inline_rank(tiny, tmp_path / "store", frozen=[LAYERS])
    save(whole, tmp_path / "whole", version=0)
    save(part, tmp_path / "part", version=0)
    with pytest.raises(CheckpointError, match=r"exp_avg/model\.layers\.0.*does not have: set trainer\.frozen"):
        restore(part, tmp_path / "whole")
    with pytest.raises(CheckpointError, match=r"lacks elements of exp_avg/model\.layers\.0.*: set trainer\.frozen"):
        restore(whole, tmp_path / "part")
