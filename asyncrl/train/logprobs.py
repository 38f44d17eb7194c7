"""Logprobs and entropy of predicted tokens from hidden states, without a whole [P, V] copy in float32."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = 1 << 24
"""Logits alive at once: 64 MiB in float32, large enough that the matrix product runs at full speed."""


def token_logprobs(hidden: Tensor, *, head: torch.nn.Module, targets: Tensor, temperatures: Tensor, vocabulary: int,
                   chunk_elements: int = CHUNK_ELEMENTS) -> tuple[Tensor, Tensor]:
    """log-softmax(logits / temperature) of each target, and the entropy of its distribution.

    Args:
        hidden: [P, D] final hidden states, each of the token before its target.
        head: maps [n, D] to [n, V] logits.
        targets: [P] int64.
        temperatures: [P] float32.
        vocabulary: V.
        chunk_elements: most logits alive at once; with a gradient a chunk's are computed again in the backward pass.

    Returns:
        logprobs [P] float32 with gradient, entropy [P] float32 detached, in nats.
    """
    rows = max(1, chunk_elements // vocabulary)
    if len(targets) <= rows:
        return _chunk(hidden, head, targets, temperatures)
    chunks = [checkpoint(_chunk, part, head, target, temperature, use_reentrant=False, preserve_rng_state=False)
              for part, target, temperature in zip(hidden.split(rows), targets.split(rows), temperatures.split(rows), strict=True)]
    logprobs, entropy = zip(*chunks, strict=True)
    return torch.cat(logprobs), torch.cat(entropy)


def _chunk(hidden: Tensor, head: torch.nn.Module, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    logits = head(hidden).float() / temperatures[:, None]
    log_probabilities = torch.log_softmax(logits, dim=-1)
    # no view: an in-place operation on one would lose FSDP2's backward hook
    logprobs = log_probabilities.gather(1, targets[:, None])[:, 0].clone()
    with torch.no_grad():
        entropy = torch.special.entr(log_probabilities.exp()).sum(dim=-1)
    return logprobs, entropy
