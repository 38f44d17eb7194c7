import json
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.plan.model_table import CONFIGS
from asyncrl.plan.models import ModelShape, model_named, shape_of

DENSE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
         "intermediate_size": 128}


@pytest.mark.parametrize(("name", "total", "active", "kv_token_bytes", "tensors"), [
    ("llama-3-8b", 8.030e9, 8.030e9, 131_072, 291), ("llama-3-70b", 70.554e9, 70.554e9, 327_680, 723),
    ("qwen3-32b", 32.76e9, 32.76e9, 262_144, 707), ("qwen3-30b-a3b", 30.53e9, 3.35e9, 98_304, 18_867),
    ("qwen3-235b-a22b", 235.1e9, 22.2e9, 192_512, 36_945), ("mixtral-8x7b", 46.7e9, 12.88e9, 131_072, 995),
    ("smollm2-135m", 134.5e6, 134.5e6, 23_040, 272), ("smollm2-360m", 361.8e6, 361.8e6, 40_960, 290),
    ("smollm2-1.7b", 1.711e9, 1.711e9, 196_608, 218)])
def test_the_table_counts_what_the_models_have(name: str, total: float, active: float, kv_token_bytes: int, tensors: int) -> None:
    shape = model_named(name)
    assert shape.total_params == pytest.approx(total, rel=1e-3)
    assert shape.active_params == pytest.approx(active, rel=1e-3)
    assert (shape.kv_token_bytes, shape.tensors, shape.is_mixture) == (kv_token_bytes, tensors, total != active)


def test_latent_attention_caches_one_latent_for_all_heads() -> None:
    shape = model_named("DeepSeek-V3")
    assert shape.kv_token_bytes == 61 * 576 * 2
    assert shape.total_params == pytest.approx(671.0e9, rel=1e-3)
    assert shape.active_params == pytest.approx(37e9, rel=0.02)
    assert shape.replica_bytes == shape.total_params  # FP8


def test_a_small_dense_model_is_counted_by_hand() -> None:
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64
    untied = shape_of(DENSE, name="small")
    assert untied.total_params == 2 * layer + 2 * 100 * 64 + 64
    assert shape_of({**DENSE, "tie_word_embeddings": True}, name="small").total_params == untied.total_params - 100 * 64
    assert untied.kv_token_bytes == 2 * 2 * 32 * 2


def test_a_mixture_counts_dense_layers_shared_experts_and_the_router() -> None:
    mixture = {**DENSE, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1,
               "first_k_dense_replace": 1}
    shape, dense, expert = shape_of(mixture, name="m"), shape_of(DENSE, name="d"), 3 * 64 * 16
    less = 3 * 64 * 128
    assert shape.total_params == dense.total_params - less + 64 * 8 + expert + 8 * expert
    assert shape.active_params == dense.total_params - less + 64 * 8 + expert + 2 * expert


def test_a_file_and_its_folder_give_the_same_shape(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": DENSE, "torch_dtype": "float32"}))
    assert model_named(tmp_path) == model_named(tmp_path / "config.json")
    assert model_named(tmp_path).rollout_param_bytes == 2.0


def test_missing_keys_are_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"without hidden_size, vocab_size.*saved with the model's weights"):
        shape_of({key: value for key, value in DENSE.items() if key not in ("hidden_size", "vocab_size")}, name="x")
    with pytest.raises(ConfigError, match="qk_nope_head_dim"):
        shape_of({**DENSE, "kv_lora_rank": 8}, name="x")


@pytest.mark.parametrize("text", ["[1]", "{", None])
def test_what_is_no_configuration_is_one_message(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"^model = "):
        model_named(tmp_path / "config.json")


def test_every_row_of_the_table_is_a_model() -> None:
    assert all(isinstance(model_named(name), ModelShape) for name in CONFIGS)
    with pytest.raises(ConfigError, match="llama-3-8b"):
        model_named("llama-9")


def test_a_shape_by_hand_is_checked() -> None:
    good = {"name": "x", "total_params": 1e9, "active_params": 1e9, "layers": 2, "hidden": 4, "kv_token_bytes": 8.0,
            "rollout_param_bytes": 2.0, "vocab": 10}
    for field, value in (("total_params", float("nan")), ("active_params", 2e9), ("layers", 0), ("kv_token_bytes", 0.0)):
        with pytest.raises(ConfigError, match=field):
            ModelShape(**{**good, field: value})
