"""What a model folder says about the model, read without torch, and the requests that such a model cannot serve."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.errors import ConfigError, EngineError
from asyncrl.model_folder import model_folder, reading, route_bytes
from asyncrl.rollout.engine import Capabilities, GenerationRequest

_CONTEXT_NAMES = ("max_position_embeddings", "n_positions")
"""Of the longest context, in config.json; GPT-2 and its kin have the second."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The limits and end tokens of one model."""

    folder: Path
    context_tokens: int
    """Prompt plus completion may not exceed this."""
    vocab_size: int
    eos_tokens: frozenset[int]
    """Union of what config.json and generation_config.json name: either alone misses some models' turn ends."""
    route_bytes: int = 0
    """Of the record of one token's experts; 0 for a model without experts."""

    @property
    def has_experts(self) -> bool:
        """Whether it is a mixture of experts."""
        return self.route_bytes > 0


def read_facts(model: str | Path, *, context_tokens: int | None = None) -> ModelFacts:
    """Facts of a model; `context_tokens` lowers its limit. Raises ConfigError when it would raise it, or neither is known."""
    folder = model_folder(model)
    config = _json(folder / "config.json")
    text = config.get("text_config") or config
    with reading(folder / "config.json"):
        vocab_size = int(text["vocab_size"])
        limits = [int(text[name]) for name in _CONTEXT_NAMES if text.get(name)]
    if context_tokens is None and not limits:
        raise ConfigError("engine.context_tokens", value=None, allowed=f"a number, where {folder / 'config.json'} names no longest context",
                          remedy="Set it to what the model was trained with.")
    if context_tokens is not None and limits and context_tokens > limits[0]:
        raise ConfigError("engine.context_tokens", value=context_tokens, allowed=f"at most the model's own {limits[0]}",
                          remedy="Lower it, or leave it out.")
    sources = (config, text, _json(folder / "generation_config.json"))
    eos = frozenset(token for source in sources for token in _token_ids(source.get("eos_token_id")))
    return ModelFacts(folder, context_tokens or limits[0], vocab_size, eos, route_bytes=route_bytes(text))


def refuse_unservable(request: GenerationRequest, facts: ModelFacts, *, capabilities: Capabilities) -> None:
    """Raise EngineError, final for the request, when an engine with these capabilities cannot serve it."""
    where = f"request {request.request_id}"
    sampling, tokens = request.sampling, request.tokens
    unsupported = capabilities.unfollowed(sampling) + (("stop",) if sampling.stop and not capabilities.stop_strings else ())
    unsupported += ("temperature",) if sampling.temperature < capabilities.lowest_temperature else ()
    if unsupported:
        raise EngineError(f"{where}: sampling.{unsupported[0]} = {getattr(sampling, unsupported[0])!r} is not supported by this engine")
    if request.wanted.routed_experts and not (capabilities.routed_experts and facts.has_experts):
        raise EngineError(f"{where}: routed experts are wanted; this engine has no record of them, or the model no experts")
    try:
        sampling.check(for_training=False)
    except ConfigError as error:
        raise EngineError(f"{where}: {error}") from error
    if not 0 < len(tokens) < facts.context_tokens:
        raise EngineError(f"{where}: {len(tokens)} prompt tokens, not between 1 and {facts.context_tokens - 1} (the context less one)")
    low, high = int(np.min(tokens)), int(np.max(tokens))
    if low < 0 or high >= facts.vocab_size:
        raise EngineError(f"{where}: token {low if low < 0 else high} is outside the vocabulary of {facts.vocab_size}")


def budget_tokens(request: GenerationRequest, facts: ModelFacts) -> int:
    """How many tokens the request may still write: its own budget or what is left of the context."""
    return min(request.sampling.max_new_tokens, facts.context_tokens - len(request.tokens))


def _json(path: Path) -> dict[str, Any]:
    with reading(path):
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _token_ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)
