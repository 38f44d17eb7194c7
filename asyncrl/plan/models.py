"""What a plan needs to know of a model: parameters, layers, bytes of KV cache, counted from a Hugging Face config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.model_folder import expert_counts
from asyncrl.plan.checks import at_least, whole
from asyncrl.plan.model_table import CONFIGS

_DTYPE_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "float8_e4m3fn": 1.0}
_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A model's dimensions, as far as FLOP, bytes and seconds follow from them."""

    name: str
    total_params: float
    active_params: float
    """Used by a token: all of a dense model, the shared part and the chosen experts of a mixture. Embeddings count."""
    layers: int
    hidden: int
    kv_token_bytes: float
    """KV cache of a token in all layers, bf16."""
    rollout_param_bytes: float
    """Of a parameter in an engine."""
    vocab: int
    tensors: int = 0
    """Named tensors of the checkpoint: what a delta walks through."""
    attention_width: int = 0
    """Heads × head_dim, of MLA the mean of scores and mixture; 0 where it is not known, then hidden stands for it."""

    def __post_init__(self) -> None:
        at_least(0, strictly=True, total_params=self.total_params, active_params=self.active_params, kv_token_bytes=self.kv_token_bytes,
                 rollout_param_bytes=self.rollout_param_bytes)
        whole(1, layers=self.layers, hidden=self.hidden, vocab=self.vocab)
        if self.active_params > self.total_params:
            raise ConfigError("active_params", value=self.active_params, allowed=f"at most total_params, {self.total_params:g}",
                              remedy="Exchange the two.")

    @property
    def replica_bytes(self) -> float:
        """W: the weights of one engine, over all its ranks."""
        return self.total_params * self.rollout_param_bytes

    @property
    def is_mixture(self) -> bool:
        """Whether a token uses a part of the parameters."""
        return self.active_params < self.total_params


def model_named(model: str | Path) -> ModelShape:
    """Of the built-in table, in any case of letters; else of a config.json, or of a folder that holds one.

    Raises ConfigError for a name that is neither, and for a configuration whose keys do not say enough.
    """
    known = CONFIGS.get(str(model).lower())
    if known is not None:
        return shape_of(known, name=str(model).lower())
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("model", value=str(model), allowed=f"config.json, a folder that holds one, or one of {', '.join(CONFIGS)}",
                          remedy="Name one of these, or the path of the model's config.json.") from error
    except ValueError as error:
        raise ConfigError("model", value=str(path), allowed="JSON", remedy=f"{error}.") from error
    if not isinstance(config, dict):
        raise ConfigError("model", value=type(config).__name__, allowed="the mapping of a Hugging Face config.json",
                          remedy="Take the config.json saved with the model's weights.")
    return shape_of(config, name=path.parent.name if path.name == "config.json" else path.stem)


def shape_of(config: Mapping[str, Any], *, name: str) -> ModelShape:
    """Counted from a Hugging Face configuration: dense, grouped-query, MLA, mixtures of experts, tied embeddings.

    Raises ConfigError that names every key it needs and misses.
    """
    text = {**config, **(config.get("text_config") or {})}
    _check_keys(text)
    layers, hidden, vocab = text["num_hidden_layers"], text["hidden_size"], text["vocab_size"]
    attention, kv_width, attention_width, attention_tensors = _attention(text)
    dense, total, active, dense_tensors, sparse_tensors = _mlps(text)
    dense_layers, sparse_layers = _layer_kinds(text)
    tied = bool(text.get("tie_word_embeddings", False))
    shared = layers * (attention + 2 * hidden) + dense_layers * dense + vocab * hidden * (1 if tied else 2) + hidden
    return ModelShape(
        name=name, total_params=float(shared + sparse_layers * total), active_params=float(shared + sparse_layers * active),
        layers=layers, hidden=hidden, kv_token_bytes=float(layers * kv_width * 2), rollout_param_bytes=_param_bytes(text), vocab=vocab,
        tensors=layers * (attention_tensors + 2) + dense_layers * dense_tensors + sparse_layers * sparse_tensors + (2 if tied else 3),
        attention_width=attention_width)


def in_dtype(model: ModelShape, *, rollout_param_bytes: float) -> ModelShape:
    """The same model, held in another dtype by engines."""
    return replace(model, rollout_param_bytes=rollout_param_bytes)


def _check_keys(config: Mapping[str, Any]) -> None:
    sparse = expert_counts(config) is not None
    needed = [*_NEEDED, *(["qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"] if "kv_lora_rank" in config else [])]
    if not (sparse and "moe_intermediate_size" in config):
        needed.append("intermediate_size")
    missing = [key for key in needed if not _is_size(config.get(key))]
    if missing:
        raise ConfigError("model", value=f"config.json without {', '.join(missing)}",
                          allowed=f"a Hugging Face configuration with positive whole numbers as {', '.join(needed)}",
                          remedy="Take the config.json saved with the model's weights, or build a ModelShape(...) by hand.")


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _attention(config: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Parameters of a layer's attention, elements of KV cache of a token in it, heads × head_dim, and named tensors."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if "kv_lora_rank" in config:
        return _latent_attention(config)
    head_dim = config.get("head_dim") or hidden // heads
    kv_width = 2 * (config.get("num_key_value_heads") or heads) * head_dim
    normed = str(config.get("model_type", "")).startswith("qwen3")
    biased = bool(config.get("attention_bias", config.get("model_type") in ("qwen2", "qwen2_moe")))
    parameters = 2 * hidden * heads * head_dim + hidden * kv_width
    parameters += (2 * head_dim if normed else 0) + (heads * head_dim + kv_width if biased else 0)
    return parameters, kv_width, heads * head_dim, 4 + 2 * normed + 3 * biased


def _latent_attention(config: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """MLA: queries and KV through low ranks; the cache holds the latent and the rotated key, once for all heads."""
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    low = config.get("q_lora_rank")
    query = hidden * low + low + low * heads * (nope + rope) if low else hidden * heads * (nope + rope)
    kv = hidden * (rank + rope) + rank + rank * heads * (nope + value)
    return query + kv + heads * value * hidden, rank + rope, heads * (nope + rope + value) // 2, 7 if low else 5


def _mlps(config: Mapping[str, Any]) -> tuple[int, int, int, int, int]:
    """Parameters of a dense layer's MLP, of a sparse one's in all and for a token, and named tensors of each."""
    hidden, counts = config["hidden_size"], expert_counts(config)
    dense = 3 * hidden * config.get("intermediate_size", 0)
    if counts is None:
        return dense, 0, 0, 3, 0
    experts, chosen = counts
    expert_width = config.get("moe_intermediate_size") or config["intermediate_size"]
    shared_width = config.get("shared_expert_intermediate_size") or expert_width * (config.get("n_shared_experts") or 0)
    around = hidden * experts + 3 * hidden * shared_width
    tensors = 3 * experts + 1 + (3 if shared_width else 0)
    expert = 3 * hidden * expert_width
    return dense, around + experts * expert, around + chosen * expert, 3, tensors


def _layer_kinds(config: Mapping[str, Any]) -> tuple[int, int]:
    """Dense and sparse layers: the first of DeepSeek's, and Qwen's `mlp_only_layers` and `decoder_sparse_step`, are dense."""
    layers = config["num_hidden_layers"]
    if expert_counts(config) is None:
        return layers, 0
    only, every = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step") or 1
    first = config.get("first_k_dense_replace") or 0
    sparse = sum(n >= first and n not in only and (n + 1) % every == 0 for n in range(layers))
    return layers - sparse, sparse


def _param_bytes(config: Mapping[str, Any]) -> float:
    """Of the dtype the weights are saved in; bf16 unless it says otherwise. What is saved in float32 is served in bf16 too."""
    if (config.get("quantization_config") or {}).get("quant_method") == "fp8":
        return 1.0
    return min(2.0, _DTYPE_BYTES.get(str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch."), 2.0))
