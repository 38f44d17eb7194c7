"""The same numbers from plain transformers, one sequence at a time: no packing, no shards, nothing of the library but the weights."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM


def load(folder: Path, *, published: bool = False) -> nn.Module:
    """The model of a folder in float32; with `published`, every weight rounded to bfloat16 and back, as engines get it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    if published:
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().float()
    return model


@torch.no_grad()
def next_logprobs(model: nn.Module, tokens: list[int]) -> Tensor:
    """[V] log-softmax of what follows `tokens`."""
    return torch.log_softmax(model(input_ids=torch.tensor([tokens])).logits[0, -1], dim=-1)


def logprob_gradients(model: nn.Module, tokens: list[int], *, places: list[int], weight: str) -> list[Tensor]:
    """∂ logprob of the token at each place / ∂ weight."""
    row = torch.tensor(tokens)
    logprobs = torch.log_softmax(model(input_ids=row[None]).logits[0, :-1], dim=-1).gather(1, row[1:, None])[:, 0]
    parameter = model.get_parameter(weight)
    return [torch.autograd.grad(logprobs[place - 1], parameter, retain_graph=True)[0] for place in places]
