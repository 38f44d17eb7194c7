"""The policy: a Hugging Face causal LM that turns micro-batches into logprobs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from asyncrl.causal_lm import load_causal_lm
from asyncrl.errors import ConfigError
from asyncrl.train.attention import PACKED, PackedSegments, register
from asyncrl.train.kept_rows import KeptRows
from asyncrl.train.logprobs import CHUNK_LOGITS, Head, Objective, Predictions, token_logprobs, token_objective
from asyncrl.train.microbatch import Microbatch, build, layout

PARITY_TOLERANCE = 1e-3
"""Largest logprob gap to transformers' own forward at load: float32 leaves about 1e-6, a transformed head or a leak over 1e-2."""


@dataclass(frozen=True, slots=True, eq=False)
class ForwardInputs:
    """A `Microbatch` as tensors on the device of the model; shapes and meaning are the same."""

    tokens: Tensor
    positions: Tensor
    segments: PackedSegments
    sources: Tensor
    targets: Tensor
    temperatures: Tensor
    places: Tensor
    cu_targets: Tensor
    kept: KeptRows | None = None

    @classmethod
    def of(cls, microbatch: Microbatch, device: torch.device) -> ForwardInputs:
        """Copies the arrays over."""
        def put(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(device)

        segments = microbatch.segments
        return cls(tokens=put(microbatch.tokens), positions=put(microbatch.positions),
                   segments=PackedSegments(segments.runs, None if segments.expand is None else put(segments.expand),
                                           None if segments.collapse is None else put(segments.collapse)),
                   sources=put(microbatch.sources), targets=put(microbatch.targets), temperatures=put(microbatch.temperatures),
                   places=put(microbatch.places), cu_targets=put(microbatch.cu_targets), kept=KeptRows.of(microbatch.kept, device))


class Policy(nn.Module):
    """Forward of one micro-batch: logprobs [P] of the targets, entropy [P] in nats, and the value of an objective of both."""

    def __init__(self, lm: PreTrainedModel, *, chunk_logits: int = CHUNK_LOGITS) -> None:
        super().__init__()
        self.lm = lm
        self._chunk_logits = chunk_logits
        self._max_tokens = _rope_limit(lm.config)

    def forward(self, inputs: ForwardInputs, objective: Objective | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Under the current weights; only predicting rows reach the head. With an objective it alone has a gradient, else the others have.

        Raises ConfigError for a sequence whose length would change the rotary embedding of the others.
        """
        longest = max(length for _, length in inputs.segments.runs)
        if self._max_tokens is not None and longest > self._max_tokens:
            raise ConfigError("model", value=f"a rotary embedding that changes beyond {self._max_tokens} tokens",
                              allowed=f"one that does not depend on the longest sequence of a micro-batch, here {longest}",
                              remedy="Train on shorter sequences or choose a model with a fixed rotary embedding.")
        hidden = self.lm.base_model(input_ids=inputs.tokens[None], position_ids=inputs.positions[None], use_cache=False,
                                    segments=inputs.segments).last_hidden_state[0].index_select(0, inputs.sources)
        head = Head.of(self.lm.get_output_embeddings(), chunk_logits=self._chunk_logits)
        predictions = Predictions(inputs.targets, inputs.temperatures, inputs.kept)
        if objective is None:
            return *token_logprobs(hidden, head=head, predictions=predictions), None
        total, logprobs, entropy = token_objective(hidden, head=head, predictions=predictions, objective=objective)
        return logprobs, entropy, total


def _rope_limit(config: PretrainedConfig) -> int | None:
    """Tokens up to which a rotary embedding is the same for all sequences; None when it always is.

    transformers chooses the frequencies of `dynamic` and `longrope` by the largest position in the input, so a long sequence would
    change the logprobs of the short ones packed with it.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    limits = []
    for part in (rope, *rope.values()):
        kind = part.get("rope_type") if isinstance(part, Mapping) else None
        if kind in ("dynamic", "longrope"):
            limits.append(part.get("original_max_position_embeddings") or config.max_position_embeddings)
    return min(limits, default=None)


def load_policy(source: Path) -> Policy:
    """The float32 model of a Hugging Face folder, without dropout. Raises ConfigError for a model this forward does not fit."""
    register()
    policy = Policy(load_causal_lm(source, dtype=torch.float32, attention=PACKED))
    _check_parity(policy)
    return policy


@torch.no_grad()
def _check_parity(policy: Policy) -> None:
    """Two packed sequences must give what transformers gives for each alone: no leak, no transform after the head."""
    lm = policy.lm
    tokens = (np.arange(11) * 7 + 3).astype(np.int32) % lm.config.vocab_size
    cu_seqlens = np.array([0, 6, 11])
    targets = np.ones(11, np.bool_)
    targets[cu_seqlens[:-1]] = False
    whole = layout(tokens, cu_seqlens=cu_seqlens, targets=targets, temperatures=np.ones(2, np.float32), group_ids=np.arange(2))
    ours, *_ = policy(ForwardInputs.of(build(whole, (0, 1)), torch.device("cpu")))
    places = build(whole, (0, 1)).places
    lm.set_attn_implementation("eager")
    theirs = torch.zeros(11)
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        row = torch.from_numpy(tokens[start:end].astype(np.int64))
        logprobs = torch.log_softmax(lm(input_ids=row[None], use_cache=False).logits[0, :-1].float(), dim=-1)
        theirs[start + 1:end] = logprobs.gather(1, row[1:, None])[:, 0]
    lm.set_attn_implementation(PACKED)
    gap = float((ours - theirs[places]).abs().max())
    if not gap < PARITY_TOLERANCE:
        raise ConfigError("model", value=f"{type(lm).__name__} (logprobs off by {gap:.3g})",
                          allowed="a causal LM whose attention is causal and whose logits are a linear map of its hidden states",
                          remedy="Models with soft-capped logits, attention sinks or their own attention code are not supported.")
