"""Critic, reference and proximal pass on two ranks: as on one, through a death, and into one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from asyncrl.channel import Request
from asyncrl.train import checkpoint_store
from asyncrl.train.trainer import Trainer
from tests.train.test_critic import GAE
from tests.train.test_ranks import killed_mid_step, whole_tensors, with_ranks
from tests.train.train_data import inline_rank, random_batch, step_on

SETTINGS = {"advantages": GAE | {"critic": {"learning_rate": 1e-2, "max_grad_norm": 1e9, "epochs": 2}}, "correction": "none",
            "reference": {"kind": "in_reward", "coefficient": 0.1}}
COMPARED = ("critic/value_loss/mean", "critic/explained_variance/last", "critic/values/mean", "reference/kl_k3/mean",
            "reference/penalty/mean", "train/loss/mean")


@pytest.mark.slow
def test_two_ranks_learn_as_one_and_go_on_after_a_death(tiny: Path, tmp_path: Path) -> None:
    results: dict[str, dict[str, float]] = {}

    async def use(trainer: Trainer) -> None:
        for version in range(2):
            results[f"two {version}"] = (await trainer.step(random_batch(version, version=version))).metrics.result()
        await trainer.save(tmp_path / "two")
        results["two 2"] = (await trainer.step(random_batch(2, version=2))).metrics.result()
        await trainer.restore(tmp_path / "two")
        results["after a death"] = (await killed_mid_step(trainer, random_batch(2, version=2))).metrics.result()

    with_ranks(tiny, tmp_path, use, processes=2, microbatch_tokens=40, **SETTINGS)
    alone = inline_rank(tiny, tmp_path / "store", **SETTINGS)
    for version in range(2):
        results[f"one {version}"] = step_on(alone, random_batch(version, version=version)).metrics.result()
    for name in COMPARED:
        assert results["after a death"][name] == results["two 2"][name]
        for version in range(2):
            assert results[f"two {version}"][name] == pytest.approx(results[f"one {version}"][name], rel=1e-3, abs=1e-5)
    assert results["two 0"]["reference/kl_k3/mean"] == 0.0 < results["two 2"]["reference/kl_k3/mean"]
    assert results["two 0"]["correction/update_ratio/min"] == results["two 0"]["correction/update_ratio/max"] == 1.0
    check_tensors(tiny, tmp_path, alone=alone)


def check_tensors(model: Path, folder: Path, *, alone: object) -> None:
    """The critic of two ranks is that of one, whole in the checkpoint, and one rank takes it up."""
    two = whole_tensors(folder / "two")
    for name, tensor in alone._tensors().items():
        if name.startswith("critic/model/"):
            assert (two[name] - tensor.detach().view(-1)).abs().mean() < 1e-4
    assert two["critic/updates"].tolist() == [4]
    manifest = checkpoint_store.verified(folder / "two")
    loaded = inline_rank(model, folder / "store", **SETTINGS)
    loaded.restore(Request("restore", body={"folder": str(folder / "two"), "updates": manifest.updates}))
    assert all(torch.equal(two[name], tensor.detach().view(-1)) for name, tensor in loaded._tensors().items())
    assert loaded._trainee.critic.optimizer.updates == 4
