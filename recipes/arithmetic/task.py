"""Sums of two two-digit numbers, `12+34=` → `046`: the task, its examples, its reward, and a model small enough to learn it here.

A tenth of all pairs is held out by a hash: never shown in the warm-up, never asked during training.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from asyncrl.types import Prompt

CHARACTERS = "0123456789+="
PAD, EOS = "<pad>", "<eos>"


def question(left: int, right: int) -> str:
    """The prompt of one sum, always six characters."""
    return f"{left:02d}+{right:02d}="


def answer(left: int, right: int) -> str:
    """The right completion, always three digits."""
    return f"{left + right:03d}"


def is_held_out(left: int, right: int) -> bool:
    """A fixed tenth of the 10,000 pairs, by a generator seeded with the pair."""
    return random.Random(100 * left + right).random() < 0.1


def pairs(seed: int, *, held_out: bool) -> Iterator[tuple[int, int]]:
    """Endless random pairs of one side of the split."""
    generator = random.Random(seed)
    while True:
        left, right = generator.randrange(100), generator.randrange(100)
        if is_held_out(left, right) == held_out:
            yield left, right


def sums(seed: int = 0) -> Iterator[Prompt]:
    """Training prompts, endless."""
    return (as_prompt(left, right, "sums") for left, right in pairs(seed, held_out=False))


def held_out_sums(count: int = 256) -> list[Prompt]:
    """Prompts of held-out pairs."""
    source = pairs(1, held_out=True)
    return [as_prompt(*next(source), "held_out") for _ in range(count)]


def as_prompt(left: int, right: int, source: str) -> Prompt:
    """The prompt, with the right answer as a column for the reward."""
    return Prompt(text=question(left, right), columns={"answer": answer(left, right)}, source=source)


def is_correct(prompt: Prompt, completion: str) -> float:
    """1 for exactly the right digits, else 0."""
    return float(completion == prompt.columns["answer"])


def worked_sums(seed: int = 0, noise: float = 0.0) -> Iterator[tuple[str, str]]:
    """Worked examples, endless; each digit of an answer is replaced by a random one with probability `noise`, as careless teachers do."""
    generator = random.Random(seed + 1)
    for left, right in pairs(seed, held_out=False):
        digits = [generator.choice("0123456789") if generator.random() < noise else digit for digit in answer(left, right)]
        yield question(left, right), "".join(digits)


def held_out_examples(seed: int = 0, noise: float = 0.0) -> list[tuple[str, str]]:
    """Held-out sums with their right answers: what the warm-up is measured on."""
    source = pairs(2, held_out=True)
    return [(question(*pair), answer(*pair)) for pair in (next(source) for _ in range(500))]


def tiny_qwen3(folder: Path, *, layers: int = 4, hidden: int = 64, heads: int = 4, intermediate: int = 128,
               initializer_range: float = 0.02, context_tokens: int = 64, characters: str = CHARACTERS) -> None:
    """Write a randomly initialised Qwen3 with a tokenizer of these characters to `folder`, in Hugging Face format."""
    import torch
    from tokenizers import Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *characters])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = Split(Regex("."), behavior="isolated")
    tokenizer.decoder = Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=PAD).save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=len(vocabulary), hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
                         num_attention_heads=heads, num_key_value_heads=heads, head_dim=hidden // heads,
                         max_position_embeddings=context_tokens, tie_word_embeddings=True, initializer_range=initializer_range,
                         pad_token_id=vocabulary[PAD], eos_token_id=vocabulary[EOS], bos_token_id=None)
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=vocabulary[EOS], pad_token_id=vocabulary[PAD])
    model.save_pretrained(folder)
