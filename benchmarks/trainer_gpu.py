"""Forward and backward of Qwen2.5's shapes in bfloat16, 4k packed tokens, random weights: tokens a second and model FLOP utilisation."""

from __future__ import annotations

import gc
import statistics
import time
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config

from asyncrl.train import attention_choice
from asyncrl.train.flops import ModelFlops
from asyncrl.train.microbatch import build, layout
from asyncrl.train.model import ForwardInputs, Policy

TOKENS, LENGTHS = 4096, (2048, 1024, 512, 512)
"""Of the packed row."""
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}
"""Dense bfloat16 by NVIDIA's data sheets, by a part of the device's name."""


def qwen(*, layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, tie: bool) -> Qwen2Config:
    """A Qwen2.5 of these dimensions."""
    return Qwen2Config(vocab_size=151_936, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
                       num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=32_768, tie_word_embeddings=tie)


CONFIGS = {"0.5B": qwen(layers=24, hidden=896, intermediate=4864, heads=14, kv_heads=2, tie=True),
           "1.5B": qwen(layers=28, hidden=1536, intermediate=8960, heads=12, kv_heads=2, tie=True),
           "3B": qwen(layers=36, hidden=2048, intermediate=11_008, heads=16, kv_heads=2, tie=True),
           "7B": qwen(layers=28, hidden=3584, intermediate=18_944, heads=28, kv_heads=4, tie=False)}


def packed_row(vocabulary: int, lengths: tuple[int, ...], device: torch.device) -> ForwardInputs:
    """Sequences that share nothing, every token but the first predicted; one more token than rows, which the last prediction needs."""
    rng = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(np.array(lengths) + 1)])
    targets = np.ones(offsets[-1], np.bool_)
    targets[offsets[:-1]] = False
    whole = layout(rng.integers(0, vocabulary, offsets[-1]).astype(np.int32), cu_seqlens=offsets, targets=targets,
                   temperatures=np.ones(len(lengths), np.float32), group_ids=np.arange(len(lengths)))
    return ForwardInputs.of(build(whole, tuple(range(len(lengths)))), device)


def measured(config: PretrainedConfig, *, lengths: tuple[int, ...] = LENGTHS, device: str = "cuda", repeats: int = 10) -> dict[str, Any]:
    """Seconds, tokens a second, memory and utilisation of a micro-batch; the model is given up afterwards."""
    where, dtype = torch.device(device), torch.bfloat16
    with where:
        lm = AutoModelForCausalLM.from_config(config, dtype=dtype)
    choice = attention_choice.choose("auto", lm=lm, device=where, dtype=dtype)
    attention_choice.use(choice, lm)
    policy, inputs = Policy(lm), packed_row(config.vocab_size, lengths, where)
    flops = ModelFlops.of(config, shapes=[parameter.shape for parameter in lm.parameters()])
    seconds = []
    for _ in range(repeats + 2):
        policy.zero_grad(set_to_none=True)
        _wait(where)
        began_s = time.perf_counter()
        total = policy(inputs, lambda logprobs, entropy, rows: -logprobs.sum())[2]
        assert total is not None
        total.backward()
        _wait(where)
        seconds.append(time.perf_counter() - began_s)
    median_s, tokens = statistics.median(seconds[2:]), sum(lengths)
    done = flops.training(tokens=tokens, predictions=tokens, lengths=lengths) / median_s
    peak = next((most for name, most in PEAK_FLOPS.items() if where.type == "cuda" and name in torch.cuda.get_device_name()), None)
    found = {"attention": choice.backend, "tokens": tokens, "median_s": round(median_s, 5), "tokens_per_s": round(tokens / median_s),
             "tflop_per_s": round(done / 1e12, 3), "mfu": None if peak is None else round(done / peak, 4),
             "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if where.type == "cuda" else None}
    del policy, lm, total
    gc.collect()
    if where.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
