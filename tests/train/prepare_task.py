"""A task so easy that a warm-up takes seconds: `4=` is answered by `4`."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path

CHARACTERS = "_$0123456789="
"""`_` pads, `$` ends."""


def copies(seed: int = 0, noise: float = 0.0) -> Iterator[tuple[str, str]]:
    """Endless."""
    return itertools.cycle(ten_copies())


def ten_copies(seed: int = 0) -> list[tuple[str, str]]:
    """They end after the first batch."""
    return [(f"{digit}=", str(digit)) for digit in range(10)]


def held_out_copies(seed: int = 0, noise: float = 0.0) -> list[tuple[str, str]]:
    """One of each."""
    return ten_copies()


def no_copies(seed: int = 0) -> list[tuple[str, str]]:
    """Nothing to measure on."""
    return []


def half_a_model(folder: Path) -> None:
    """The disk is full after the first file."""
    (folder / "config.json").write_text("{}", encoding="utf-8")
    raise OSError("no space left on device")


def killed_half_way(folder: Path) -> None:
    """The machine is out of memory after the first file."""
    (folder / "config.json").write_text("{}", encoding="utf-8")
    os.kill(os.getpid(), signal.SIGKILL)


def endless(folder: Path) -> None:
    """Somebody interrupts it after the first file."""
    (folder / "config.json").write_text("{}", encoding="utf-8")
    signal.pause()


def tiny_model(folder: Path, *, hidden: int, eos_token: int | None = 1) -> None:
    """One layer and a character tokenizer."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    tokenizer = Tokenizer(WordLevel({character: index for index, character in enumerate(CHARACTERS)}, unk_token="_"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.decoder = Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="_", eos_token="$", unk_token="_").save_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(Qwen3Config(
            vocab_size=len(CHARACTERS), hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, head_dim=hidden // 2, max_position_embeddings=16, pad_token_id=0,
            eos_token_id=eos_token, bos_token_id=None))
    model.generation_config = GenerationConfig(eos_token_id=eos_token, pad_token_id=0)
    model.save_pretrained(folder)
