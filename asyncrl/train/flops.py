"""Floating-point operations of a transformer, by our own counting from its dimensions. Needs no torch.

A multiplication and an addition are two operations. A weight is used once a token, one of an expert by the tokens sent to it; a query
meets every key up to its own, once in the scores and once in the mixture. Norms, activations, softmax and the embedding's look-up are left
out: they are below a percent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.model_folder import expert_counts


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """What one token, one pair and one prediction cost in a forward."""

    token: float
    """A token's way through all layers."""
    pair: float
    """A query and a key, in all layers and heads."""
    prediction: float
    """The output layer."""

    @classmethod
    def of(cls, config: Any, *, shapes: Iterable[Sequence[int]]) -> ModelFlops:
        """Of a Hugging Face configuration, by its text model where it has more, and the shapes of different parameters, tied ones once.

        Those of E experts, [E, …, …] as transformers holds them, count by the share of them that a token is sent to.
        """
        config = config.get_text_config()
        experts, chosen = expert_counts(config.to_dict()) or (0, 0)
        parameters = sum(math.prod(shape) * (chosen / experts if len(shape) == 3 and shape[0] == experts else 1.0) for shape in shapes)
        embedding = config.vocab_size * config.hidden_size
        layers = parameters - embedding * (1 if config.tie_word_embeddings else 2)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(token=2.0 * layers, pair=4.0 * config.num_hidden_layers * config.num_attention_heads * head_dim,
                   prediction=2.0 * embedding)

    @property
    def pair_cost(self) -> float:
        """Of a pair, where a token and its prediction cost 1."""
        return self.pair / (self.token + self.prediction)

    def training(self, *, tokens: int, predictions: int, lengths: Sequence[int]) -> float:
        """Forward and backward of so many rows and predictions, attention within sequences of these lengths. Backward is two forwards;
        what is computed again to save memory is not counted."""
        pairs = sum(length * (length + 1) // 2 for length in lengths)
        return 3.0 * (self.token * tokens + self.pair * pairs + self.prediction * predictions)
