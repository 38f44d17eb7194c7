"""Logprobs and entropies as transformers itself gives them, float64, one sequence at a time, with gradient."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from asyncrl.train.batch import PackedBatch


def plain_model(folder: Path) -> PreTrainedModel:
    """Of a folder, in float64."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()


def plain_scores(lm: PreTrainedModel, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """[T] logprob of each token but the first of its sequence, and entropy of what it was drawn from; 0 at the first."""
    logprobs, entropies = [], []
    for n, (start, end) in enumerate(zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)):
        tokens = torch.from_numpy(batch.tokens[start:end]).long()
        logits = lm(input_ids=tokens[None], use_cache=False).logits[0, :-1].double() / float(batch.temperatures[n])
        whole = torch.log_softmax(logits, dim=-1)
        zero = torch.zeros(1, dtype=torch.float64)
        logprobs.append(torch.cat([zero, whole.gather(1, tokens[1:, None])[:, 0]]))
        entropies.append(torch.cat([zero, -(whole.exp() * whole).sum(-1)]))
    return torch.cat(logprobs), torch.cat(entropies)


def gradients_of(lm: PreTrainedModel, loss: Tensor) -> dict[str, Tensor]:
    """By parameter."""
    names, parameters = zip(*lm.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def assert_close(ours: dict[str, Tensor], plain: dict[str, Tensor], *, tolerance: float = 1e-5) -> None:
    """Relative to the largest of all."""
    largest = max(float(gradient.abs().max()) for gradient in plain.values())
    assert largest > 0
    assert ours.keys() == plain.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(ours[name].double(), gradient.double(), rtol=0, atol=tolerance * largest)
