"""A Qwen3 or Llama small enough for tests, written as a Hugging Face folder with a character tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

PAD, EOS = 0, 1
CHARACTERS = "0123456789+-=? "
CONTEXT_TOKENS = 256


def make_tiny_model(folder: str | Path, *, seed: int = 0, tie: bool = True, vocab: int = 16, layers: int = 2, hidden: int = 32,
                    architecture: Literal["qwen3", "llama"] = "qwen3") -> Path:
    """Write an fp32 model with random weights: token 0 pads, token 1 ends, then one token a character. Returns `folder`."""
    folder = Path(folder)
    config_class, model_class = (Qwen3Config, Qwen3ForCausalLM) if architecture == "qwen3" else (LlamaConfig, LlamaForCausalLM)
    config = config_class(vocab_size=vocab, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
                          num_attention_heads=4, num_key_value_heads=2, head_dim=hidden // 4, max_position_embeddings=CONTEXT_TOKENS,
                          tie_word_embeddings=tie, eos_token_id=EOS, pad_token_id=PAD, bos_token_id=None, dtype="float32")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                # wider than the usual 0.02, so that the distributions of two models differ visibly
                torch.nn.init.normal_(parameter, std=0.3 if "embed" in name else 0.15)
    model.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=PAD)
    model.save_pretrained(folder)
    character_tokenizer(vocab).save(str(folder / "tokenizer.json"))
    return folder


def character_tokenizer(vocab: int) -> Tokenizer:
    characters = CHARACTERS[: vocab - 2]
    words = {"<pad>": PAD, "<eos>": EOS} | {character: index + 2 for index, character in enumerate(characters)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.decoder = Fuse()
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    return tokenizer
