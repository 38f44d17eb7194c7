"""Models with random weights, as published, and what an update makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config, Qwen3Config

from asyncrl.weights.codec import Bits
from asyncrl.weights.manifest import Piece
from asyncrl.weights.torch_pieces import bits_of, checkpoint_tensors
from benchmarks.trainer_steps import smollm2, tiny

SEED = 7
SPREAD = 0.02
"""Standard deviation of weights, as models are initialised."""
LARGE_ELEMENTS = 1 << 20
"""From here on a tensor is long enough for its block counts not to weigh."""


def qwen2_half_billion() -> Qwen2Config:
    """Qwen2.5-0.5B."""
    return Qwen2Config(vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
                       num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1,
                       bos_token_id=None)


def quick() -> Qwen3Config:
    """Of 2.2M parameters, half of them in one tensor of a million elements."""
    return Qwen3Config(vocab_size=8200, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
                       num_key_value_heads=2, head_dim=32, max_position_embeddings=256, tie_word_embeddings=True, pad_token_id=0,
                       eos_token_id=1, bos_token_id=None)


CONFIGS = {"0.6M": tiny, "135M": smollm2, "0.5B": qwen2_half_billion}
QUICK = {"quick": quick}


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """Published bits by checkpoint name, flat."""

    pieces: tuple[Piece, ...]
    bits: Mapping[str, Bits]

    @property
    def elements(self) -> int:
        """Of all tensors."""
        return sum(piece.length for piece in self.pieces)

    @property
    def nbytes(self) -> int:
        """Of all tensors, as published."""
        return sum(bits.nbytes for bits in self.bits.values())

    def tensors(self) -> dict[str, Tensor]:
        """The same memory as bfloat16, flat."""
        return {name: torch.from_numpy(bits).view(torch.bfloat16) for name, bits in self.bits.items()}

    def changed(self, density: float) -> State:
        """A neighbour: about this share of the values, at random places, one step of the grid up or down; 1 means all."""
        random = np.random.default_rng(SEED)
        return State(self.pieces, {name: _stepped(bits, density, random) for name, bits in self.bits.items()})

    def density_to(self, other: State) -> float:
        """Share of values that differ."""
        return sum(int(np.count_nonzero(bits != other.bits[name])) for name, bits in self.bits.items()) / self.elements


def initial_state(config: PretrainedConfig) -> State:
    """Normal weights in bfloat16. The model itself is never built."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    pieces = tuple(Piece(name=name, dtype="BF16", shape=tuple(tensor.shape), start=0, length=tensor.numel())
                   for name, tensor in checkpoint_tensors(model).items())
    generator = torch.Generator().manual_seed(SEED)
    return State(pieces, {piece.name: bits_of((torch.randn(piece.length, generator=generator) * SPREAD).bfloat16()) for piece in pieces})


def float32_model(config: PretrainedConfig, state: State) -> nn.Module:
    """What a trainer holds that publishes `state`."""
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    load(model, state)
    return model


@torch.no_grad()
def load(model: nn.Module, state: State) -> None:
    """Make `state` the model's."""
    published = state.tensors()
    for name, tensor in checkpoint_tensors(model).items():
        tensor.view(-1).copy_(published[name])


def _stepped(bits: Bits, density: float, random: np.random.Generator) -> Bits:
    dice = random.integers(0, 1 << 16, (2, len(bits)), dtype=np.uint16)
    chosen = dice[0] < round(density * (1 << 16)) if density < 1 else np.ones(len(bits), np.bool_)
    step = np.where((dice[1] & 1 != 0) | (bits & 0x7FFF == 0), np.uint16(1), np.uint16(0xFFFF))  # below 0 lies a NaN
    return np.where(chosen, bits + step, bits)
