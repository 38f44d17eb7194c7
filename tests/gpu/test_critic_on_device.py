"""Critic, reference and proximal pass on the CPU and, where there is one, on a GPU, in either precision."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from asyncrl.train.batch import pack
from asyncrl.train.minibatch import minibatches_of
from asyncrl.train.parallel import whole
from asyncrl.train.passes import critic_values
from tests.gpu.one_rank import OneRank, step
from tests.train.train_data import random_batch

CRITIC = {"learning_rate": 1e-2, "max_grad_norm": 1e9, "value_clip": None}
GAE = {"kind": "gae", "critic": CRITIC}
GAPS = {"float32": 2e-3, "bfloat16": 0.1}
"""Of values after two steps, to those of the CPU in float32, relative to the largest; kernels of a GPU multiply in TF32."""
pytestmark = pytest.mark.filterwarnings("ignore")  # of torch about torch, while it imports its compiler


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recomputed", ["none", "full"])
def test_equal_weights_give_equal_bits(recomputed: str, dtype: str, one_rank: OneRank, model: Path) -> None:
    algorithm = {"reference": {"kind": "in_reward", "coefficient": 0.1}}
    with one_rank.trainer(model, algorithm=algorithm, dtype=dtype, activation_checkpointing=recomputed, microbatch_tokens=40) as rank:
        first, second = (step(rank, random_batch(version, version=version)).metrics.result() for version in range(2))
    assert first["reference/kl_k3/mean"] == 0.0 < second["reference/kl_k3/mean"]
    for metrics in (first, second):
        assert metrics["correction/update_ratio/min"] == metrics["correction/update_ratio/max"] == 1.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_critic_learns_the_same_values_in_either_precision(dtype: str, one_rank: OneRank, model: Path, tmp_path: Path,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for rank_of, precision in ((OneRank("cpu", tmp_path / "plain", monkeypatch), "float32"), (one_rank, dtype)):
        (tmp_path / "plain").mkdir(exist_ok=True)
        with rank_of.trainer(model, algorithm={"advantages": GAE}, dtype=precision, eps=0.1) as rank:
            for version in range(2):
                step(rank, random_batch(version, version=version))
            values = critic_values(rank._trainee, minibatches_of(rank._trainee, pack(random_batch(2))))
            found.append(values.cpu())
            # sharded again: what a forward gathers is of the dtype it computes in
            assert {whole(parameter).dtype for parameter in rank._trainee.critic.model.parameters()} == {torch.float32}
    assert float((found[0] - found[1]).abs().max()) <= GAPS[dtype] * float(found[0].abs().max())
    assert float(found[0].abs().max()) > 0.0
