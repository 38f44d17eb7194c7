"""The policy: a Hugging Face causal LM that turns micro-batches into logprobs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from asyncrl.causal_lm import load_causal_lm
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.expert_routing import Routing
from asyncrl.train.attention import PackedSegments
from asyncrl.train.attention_choice import register
from asyncrl.train.flops import ModelFlops
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
    experts: Tensor | None = None

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
                   places=put(microbatch.places), cu_targets=put(microbatch.cu_targets), kept=KeptRows.of(microbatch.kept, device),
                   experts=None if microbatch.experts is None else put(microbatch.experts))


class Body(nn.Module):
    """A transformer that reads micro-batches; what is made of its hidden states is another's."""

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        self.lm = lm
        self._max_tokens = _rope_limit(lm.config.get_text_config())
        self.routing: Routing | None = None
        """Replays recorded experts; None: the routers choose for themselves."""

    def predicting(self, inputs: ForwardInputs) -> Tensor:
        """[P, D] hidden states of the rows that predict.

        Raises ConfigError for a sequence whose length would change the rotary embedding of the others.
        """
        if self._max_tokens is not None and inputs.segments.longest > self._max_tokens:
            raise ConfigError("model", value=f"a rotary embedding that changes beyond {self._max_tokens} tokens",
                              allowed=f"one that does not depend on the longest sequence of a micro-batch, here {inputs.segments.longest}",
                              remedy="Train on shorter sequences or choose a model with a fixed rotary embedding.")
        if self.routing is not None:
            is_dummy = not len(inputs.sources)
            self.routing.replay(inputs.experts, rows=0 if is_dummy else len(inputs.tokens))
        return self.lm.base_model(input_ids=inputs.tokens[None], position_ids=inputs.positions[None], use_cache=False,
                                  segments=inputs.segments).last_hidden_state[0].index_select(0, inputs.sources)


class Policy(Body):
    """Forward of one micro-batch: logprobs [P] of the targets, entropy [P] in nats, and the value of an objective of both."""

    def __init__(self, lm: PreTrainedModel, *, chunk_logits: int = CHUNK_LOGITS) -> None:
        super().__init__(lm)
        self._chunk_logits = chunk_logits
        self._softcap, self._logit_scale = _head_transform(lm.config.get_text_config())

    @functools.cached_property
    def flops(self) -> ModelFlops:
        """What its dimensions cost; they stay as they are, so it is counted once."""
        return ModelFlops.of(self.lm.config, shapes=[parameter.shape for parameter in self.lm.parameters()])

    def forward(self, inputs: ForwardInputs, objective: Objective | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Under the current weights; only predicting rows reach the head. With an objective it alone has a gradient, else the others have.

        Raises ConfigError as `predicting`.
        """
        hidden = self.predicting(inputs)
        head = Head.of(self.lm.get_output_embeddings(), chunk_logits=self._chunk_logits, softcap=self._softcap)
        predictions = Predictions(inputs.targets, inputs.temperatures / self._logit_scale, inputs.kept)
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


def _head_transform(config: PretrainedConfig) -> tuple[float | None, float]:
    """The soft cap of the logits, and what the head's products are multiplied by: as Gemma, Cohere and Granite name them."""
    scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
    return getattr(config, "final_logit_softcapping", None), float(scale)


def load_policy(source: Path, *, chunk_logits: int = CHUNK_LOGITS, routing_replay: bool = False) -> Policy:
    """The float32 model of a Hugging Face folder, without dropout. Raises ConfigError for one this forward, or a replay, does not fit."""
    lm = load_causal_lm(source, dtype=torch.float32)
    attention = register()
    lm.set_attn_implementation(attention)
    if lm.config._attn_implementation != attention or lm.base_model is lm:
        raise _refused(f"{type(lm).__name__} (its attention or its body cannot be called from outside)")
    policy = Policy(lm, chunk_logits=chunk_logits)
    _check_parity(policy)
    if routing_replay:
        policy.routing = Routing(lm, forward=lambda: policy(ForwardInputs.of(_packed(lm)[0], torch.device("cpu"))))
    return policy


@torch.no_grad()
def _check_parity(policy: Policy) -> None:
    """Packed sequences, two of which share their first tokens, must give what transformers gives for each alone."""
    lm = policy.lm
    microbatch, tokens, cu_seqlens = _packed(lm)
    inputs = ForwardInputs.of(microbatch, torch.device("cpu"))
    try:
        ours, *_ = policy(inputs)
    except (AsyncRLError, MemoryError):
        raise
    except Exception as error:
        raise _refused(f"{type(lm).__name__} (it fails without a mask, {type(error).__name__}: {error})") from error
    lm.set_attn_implementation("eager")
    theirs = torch.zeros(len(tokens))
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        row = torch.from_numpy(tokens[start:end].astype(np.int64))
        logprobs = torch.log_softmax(lm(input_ids=row[None], use_cache=False).logits[0, :-1].float(), dim=-1)
        theirs[start + 1:end] = logprobs.gather(1, row[1:, None])[:, 0]
    lm.set_attn_implementation(register())
    gap = float((ours - theirs[microbatch.places]).abs().max())
    if not gap < PARITY_TOLERANCE:
        raise _refused(f"{type(lm).__name__} (logprobs off by {gap:.3g})")


def _packed(lm: PreTrainedModel) -> tuple[Microbatch, NDArray[np.int32], NDArray[np.int64]]:
    """A micro-batch of sequences that share some tokens, its tokens, and where each sequence starts."""
    rows = [[3, 10, 17, 24, 31, 38], [3, 10, 17, 45, 52], [7, 14, 21, 28]]
    cu_seqlens = np.cumsum([0, *map(len, rows)])
    tokens = np.concatenate(rows).astype(np.int32) % lm.config.get_text_config().vocab_size
    targets = np.ones(len(tokens), np.bool_)
    targets[cu_seqlens[:-1]] = False
    whole = layout(tokens, cu_seqlens=cu_seqlens, targets=targets, temperatures=np.ones(3, np.float32), group_ids=np.array([0, 0, 1]))
    return build(whole, (0, 1, 2)), tokens, cu_seqlens


def _refused(value: str) -> ConfigError:
    return ConfigError("model", value=value,
                       allowed="a causal LM whose layers mix tokens by causal attention alone, through transformers' attention interface, "
                               "and whose logits are a linear map of its hidden states, scaled or soft-capped",
                       remedy="Models with attention sinks, recurrent layers or attention code of their own are not supported.")
