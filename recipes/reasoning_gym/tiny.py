"""A model small enough to learn easy questions on a CPU: a character is a token, for whatever printable ASCII can write."""

from __future__ import annotations

from pathlib import Path

CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
PAD, EOS = "<pad>", "<eos>"


def tiny_qwen3(folder: Path, *, layers: int = 4, hidden: int = 64, heads: int = 4, intermediate: int = 128,
               initializer_range: float = 0.06, seed: int = 0) -> None:
    """Write a randomly initialised Qwen3 with a character tokenizer to `folder`, in Hugging Face format."""
    import torch
    from tokenizers import Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *CHARACTERS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=PAD).save_pretrained(folder)
    torch.manual_seed(seed)
    config = Qwen3Config(vocab_size=len(vocabulary), hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
                         num_attention_heads=heads, num_key_value_heads=heads, head_dim=hidden // heads, max_position_embeddings=256,
                         tie_word_embeddings=True, initializer_range=initializer_range,
                         pad_token_id=vocabulary[PAD], eos_token_id=vocabulary[EOS], bos_token_id=None)
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=vocabulary[EOS], pad_token_id=vocabulary[PAD])
    model.save_pretrained(folder)
