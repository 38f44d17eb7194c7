"""Dimensions of well-known models, as their config.json says them: what `--model NAME` plans without a file."""

from __future__ import annotations

from typing import Any


def _dense(layers: int, hidden: int, intermediate: int, heads: tuple[int, int], vocab: int, **more: Any) -> dict[str, Any]:
    """heads: of queries, of keys and values."""
    return {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": intermediate, "num_attention_heads": heads[0],
            "num_key_value_heads": heads[1], "vocab_size": vocab, **more}


def _qwen3(layers: int, hidden: int, intermediate: int, heads: tuple[int, int], **more: Any) -> dict[str, Any]:
    return _dense(layers, hidden, intermediate, heads, 151_936, head_dim=128, **{"model_type": "qwen3", **more})


def _qwen3_moe(layers: int, hidden: int, heads: tuple[int, int], expert: int) -> dict[str, Any]:
    return _qwen3(layers, hidden, 3 * hidden, heads, model_type="qwen3_moe", num_experts=128, num_experts_per_tok=8,
                  moe_intermediate_size=expert)


CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3-8b": _dense(32, 4096, 14_336, (32, 8), 128_256),
    "llama-3-70b": _dense(80, 8192, 28_672, (64, 8), 128_256),
    "llama-3.2-1b": _dense(16, 2048, 8192, (32, 8), 128_256, head_dim=64, tie_word_embeddings=True),
    "llama-3.2-3b": _dense(28, 3072, 8192, (24, 8), 128_256, tie_word_embeddings=True),
    "qwen2.5-7b": _dense(28, 3584, 18_944, (28, 4), 152_064, model_type="qwen2"),
    "qwen2.5-32b": _dense(64, 5120, 27_648, (40, 8), 152_064, model_type="qwen2"),
    "qwen2.5-72b": _dense(80, 8192, 29_568, (64, 8), 152_064, model_type="qwen2"),
    "qwen3-0.6b": _qwen3(28, 1024, 3072, (16, 8), tie_word_embeddings=True),
    "qwen3-1.7b": _qwen3(28, 2048, 6144, (16, 8), tie_word_embeddings=True),
    "qwen3-4b": _qwen3(36, 2560, 9728, (32, 8), tie_word_embeddings=True),
    "qwen3-8b": _qwen3(36, 4096, 12_288, (32, 8)),
    "qwen3-14b": _qwen3(40, 5120, 17_408, (40, 8)),
    "qwen3-32b": _qwen3(64, 5120, 25_600, (64, 8)),
    "qwen3-30b-a3b": _qwen3_moe(48, 2048, (32, 4), 768),
    "qwen3-235b-a22b": _qwen3_moe(94, 4096, (64, 4), 1536),
    "mixtral-8x7b": _dense(32, 4096, 14_336, (32, 8), 32_000, num_local_experts=8, num_experts_per_tok=2),
    "deepseek-v3": _dense(61, 7168, 18_432, (128, 128), 129_280, model_type="deepseek_v3", kv_lora_rank=512, q_lora_rank=1536,
                          qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=256, n_shared_experts=1,
                          num_experts_per_tok=8, moe_intermediate_size=2048, first_k_dense_replace=3,
                          quantization_config={"quant_method": "fp8"}),
    "smollm2-135m": _dense(30, 576, 1536, (9, 3), 49_152, tie_word_embeddings=True),
    "smollm2-360m": _dense(32, 960, 2560, (15, 5), 49_152, tie_word_embeddings=True),
    "smollm2-1.7b": _dense(24, 2048, 8192, (32, 32), 49_152, tie_word_embeddings=True)}
"""By name. A checkpoint of DeepSeek-V3 is FP8; its multi-token head is left out."""
