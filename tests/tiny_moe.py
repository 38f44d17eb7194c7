"""A Qwen3 mixture of experts small enough for tests, whose experts differ so much that the choice of one is seen in every logprob."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.tiny_model import CONTEXT_TOKENS, EOS, PAD, character_tokenizer

LAYERS, EXPERTS, CHOSEN = 2, 8, 2


def make_tiny_moe(folder: Path, *, vocab: int = 16, hidden: int = 32, seed: int = 0, experts: int = EXPERTS) -> Path:
    """Write an fp32 model with random weights and the tokenizer of `make_tiny_model`. With two experts there is no choice."""
    config = Qwen3MoeConfig(vocab_size=vocab, hidden_size=hidden, intermediate_size=2 * hidden, moe_intermediate_size=hidden,
                            num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, head_dim=hidden // 4,
                            num_experts=experts, num_experts_per_tok=CHOSEN, norm_topk_prob=True, max_position_embeddings=CONTEXT_TOKENS,
                            tie_word_embeddings=True, eos_token_id=EOS, pad_token_id=PAD, bos_token_id=None, dtype="float32")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(config)
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                torch.nn.init.normal_(parameter, std=0.3 if "embed" in name else 0.2)
    model.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=PAD)
    model.save_pretrained(folder)
    character_tokenizer(vocab).save(str(folder / "tokenizer.json"))
    return folder
