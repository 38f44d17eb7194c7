"""A tiny model with random weights of each family of causal LMs, as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

WINDOW = 5
"""Keys a query of a windowed layer sees; sequences of the tests are longer."""
_COMMON = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
           "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
           "attention_dropout": 0.0, "dtype": "float32"}
_MIXED = ["sliding_attention", "full_attention"]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama untied": ("Llama", {"tie_word_embeddings": False}),
    "llama tied, one head of keys": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen2, a window in the second layer": ("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": _MIXED[::-1]}),
    "qwen3 tied": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
    "qwen3-moe": ("Qwen3Moe", {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    "gemma": ("Gemma", {"head_dim": 8}),
    "gemma2, scores and logits capped": ("Gemma2", {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": WINDOW,
                                                    "layer_types": _MIXED, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5}),
    "gemma3, windows by layer": ("Gemma3", {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": WINDOW, "layer_types": _MIXED}),
    "mistral, a window": ("Mistral", {"sliding_window": WINDOW}),
    "phi3": ("Phi3", {"sliding_window": None}),
    "gpt-neox": ("GPTNeoX", {}),
    "gpt2, learned positions": ("GPT2", {}),
    "olmo3, windows by layer": ("Olmo3", {"sliding_window": WINDOW, "layer_types": _MIXED}),
    "opt": ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "deepseek-v3, keys from a latent": ("DeepseekV3", {
        "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "kv_lora_rank": 16,
        "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "moe_intermediate_size": 16,
        "first_k_dense_replace": 1}),
    "cohere, logits scaled": ("Cohere", {"logit_scale": 0.5}),
    "granite, logits scaled": ("Granite", {"logits_scaling": 3.0, "residual_multiplier": 0.7, "embedding_multiplier": 2.0})}
"""Class and settings, by what is special."""
ON_GPU: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2, heads of 16": ("Gemma2", FAMILIES["gemma2, scores and logits capped"][1] | {"head_dim": 16})}
"""Of shapes that kernels for GPUs ask for."""


def make_family(name: str, folder: Path) -> Path:
    """Write the model; weights are wide, biases and norms included, so that no term is too small to be seen."""
    family, settings = (FAMILIES | ON_GPU)[name]
    config_class = getattr(transformers, "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config")
    config = config_class(**_COMMON | settings)
    model_class = getattr(transformers, f"{family}LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        lm: PreTrainedModel = model_class(config)
        for parameter_name, parameter in lm.named_parameters():
            mean = 1.0 if "norm" in parameter_name and "weight" in parameter_name else 0.0
            torch.nn.init.normal_(parameter, mean=mean, std=0.3 if "embed" in parameter_name else 0.15)
    lm.save_pretrained(folder)
    return folder
