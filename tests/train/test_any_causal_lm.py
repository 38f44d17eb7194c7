"""A step of each family against the same step written plainly in float64: transformers' own forward and eager attention, one sequence at a
time, autograd, torch's AdamW."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.channel import Request
from asyncrl.train.batch import pack
from tests.train.families import FAMILIES, WINDOW, make_family
from tests.train.plain_step import EPS, LEARNING_RATE, PlainStep, plain_step
from tests.train.train_data import inline_rank, random_batch, step_on

HOW = PlainStep(advantages="grpo", correction="token_tis", loss="decoupled_ppo", aggregation="token_mean", minibatches_per_step=1, epochs=1,
                max_grad_norm=1e9)
TEMPERATURE = 0.8


def logprobs_and_entropy(lm: torch.nn.Module, tokens: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each token but the first."""
    row = torch.from_numpy(tokens).long()
    with torch.no_grad():
        logprobs = torch.log_softmax(lm(input_ids=row[None], use_cache=False).logits[0, :-1] / TEMPERATURE, dim=-1)
    return logprobs.gather(1, row[1:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_of_any_family_equals_one_written_plainly(family: str, tmp_path: Path) -> None:
    folder, batch = make_family(family, tmp_path / "model"), random_batch(0, longest=12, temperature=TEMPERATURE)
    packed = pack(batch)
    lengths = np.diff(packed.cu_seqlens)
    assert lengths.max() > 2 * WINDOW
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager",
                                              experts_implementation="eager").eval()
    rows = [packed.tokens[start:start + length] for start, length in zip(packed.cu_seqlens, lengths, strict=False)]
    expected = [logprobs_and_entropy(lm, row) for row in rows]

    rank = inline_rank(folder, tmp_path / "store", correction=HOW.correction, loss={"kind": HOW.loss, "clip_low": 0.2, "clip_high": 0.28},
                       eps=EPS, learning_rate=LEARNING_RATE, betas=(0.9, 0.95), microbatch_tokens=60)
    scored = rank.score(Request("score", body={}, arrays={"tokens": packed.tokens, "cu_seqlens": packed.cu_seqlens,
                                                          "temperatures": packed.temperatures})).arrays["logprobs"]
    firsts = [torch.cat([torch.zeros(1), logprobs]) for logprobs, _ in expected]
    torch.testing.assert_close(torch.from_numpy(scored).double(), torch.cat(firsts).double(), rtol=0, atol=2e-5)

    metrics, plain = step_on(rank, batch).metrics.result(), plain_step(folder, batch, HOW)
    entropy = torch.cat([torch.cat([torch.zeros(1), entropy]) for _, entropy in expected])
    assert metrics["train/entropy/mean"] == pytest.approx(float(entropy[torch.from_numpy(packed.loss_mask)].mean()), abs=1e-5)
    assert metrics["train/loss/mean"] == pytest.approx(plain.losses[0], abs=1e-5)
    assert metrics["train/grad_norm/last"] == pytest.approx(plain.grad_norms[0], rel=1e-4)
    moved = max(float((plain.weights[name] - before).detach().abs().max()) for name, before in lm.named_parameters())
    assert moved > 0
    for name, parameter in rank._lm.named_parameters():
        torch.testing.assert_close(parameter.double(), plain.weights[name], rtol=0, atol=1e-3 * moved + 1e-7)
