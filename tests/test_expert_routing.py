"""The choice of experts, recorded and repeated: in every router's own code, with its gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from torch.nn.functional import silu
from transformers import AutoModelForCausalLM, PreTrainedModel

from asyncrl.errors import ConfigError, ShapeError
from asyncrl.expert_routing import Routing
from asyncrl.records import NO_EXPERT
from tests.tiny_model import make_tiny_model
from tests.tiny_moe import CHOSEN, EXPERTS, LAYERS, make_tiny_moe

TOKENS = torch.tensor([[3, 9, 4, 4, 11, 7, 2]])
_SIZES = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
          "num_key_value_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0, "num_experts_per_tok": 2, "bos_token_id": None,
          "eos_token_id": 1}
_LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 8,
           "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
FAMILIES: dict[str, tuple[str, dict[str, Any], int]] = {
    "softmax before the choice, a dense layer": ("Qwen3Moe", {"num_experts": 8, "moe_intermediate_size": 24, "mlp_only_layers": [1]}, 2),
    "softmax before, always normalised": ("Mixtral", {"num_local_experts": 8}, 3),
    "softmax before, not normalised": ("Olmoe", {"num_experts": 8}, 3),
    "softmax after, biases": ("GptOss", {"num_local_experts": 8, "head_dim": 8}, 3),
    "sigmoid, groups, a bias that chooses alone": ("DeepseekV3", _LATENT, 2),
    "sigmoid, groups, another router class": ("Glm4Moe", {"head_dim": 8, **{name: _LATENT[name] for name in (
        "n_routed_experts", "n_group", "topk_group", "moe_intermediate_size", "first_k_dense_replace")}}, 2),
    "a shared expert beside": ("Qwen2Moe", {"num_experts": 8, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}, 3)}


def of_family(name: str) -> PreTrainedModel:
    family, settings, _ = FAMILIES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        lm = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**_SIZES | settings))
        for parameter in lm.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return lm.eval()


def logits(lm: PreTrainedModel) -> Tensor:
    return lm(input_ids=TOKENS, use_cache=False).logits


def routing_of(lm: PreTrainedModel) -> Routing:
    return Routing(lm, forward=lambda: logits(lm))


def as_rows(experts: np.ndarray) -> Tensor:
    return torch.from_numpy(experts)


@pytest.fixture
def moe(tmp_path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(make_tiny_moe(tmp_path)).eval()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_choice_that_is_repeated_changes_no_bit_and_another_one_does(name: str) -> None:
    lm = of_family(name)
    routing = routing_of(lm)
    routing.begin()
    plain = logits(lm)
    experts = routing.end()
    assert experts.shape == (TOKENS.numel(), FAMILIES[name][2], 2)
    routing.replay(as_rows(experts), rows=TOKENS.numel())
    assert torch.equal(logits(lm), plain)
    for layer in range(routing.layers):
        other = experts.copy()
        other[-1, layer] = [expert for expert in range(8) if expert not in experts[-1, layer]][:2]
        routing.replay(as_rows(other), rows=TOKENS.numel())
        routing.begin()
        changed = logits(lm)
        torch.testing.assert_close(changed[:, :-1], plain[:, :-1], rtol=1e-4, atol=1e-4, msg="of the tokens before")
        assert (changed[:, -1] - plain[:, -1]).abs().max() > 1e-3
        assert np.array_equal(routing.end()[:, :layer + 1], experts[:, :layer + 1]), "what is recorded is the router's own choice"
    routing.replay(None, rows=TOKENS.numel())
    assert torch.equal(logits(lm), plain)


def test_a_token_without_a_record_is_sent_where_its_router_says(moe: PreTrainedModel) -> None:
    routing = routing_of(moe)
    plain = logits(moe)
    routing.replay(torch.full((TOKENS.numel(), LAYERS, CHOSEN), NO_EXPERT, dtype=torch.int16), rows=TOKENS.numel())
    assert torch.equal(logits(moe), plain)
    assert routing.counted(torch.device("cpu")).tolist() == [7.0, 0.0, 0.0]


def test_what_was_replayed_and_flipped_is_counted_once_a_forward(moe: PreTrainedModel) -> None:
    routing = routing_of(moe)
    routing.begin()
    logits(moe)
    experts = routing.end()
    experts[5:] = NO_EXPERT
    experts[0, 0, 0] = next(expert for expert in range(EXPERTS) if expert not in experts[0, 0])
    for _ in range(3):
        routing.replay(as_rows(experts), rows=TOKENS.numel())
        logits(moe)
        logits(moe)  # as a gradient computes it again
    rows, replayed, flipped = routing.counted(torch.device("cpu")).tolist()
    assert (rows, replayed) == (21.0, 15.0)
    assert flipped >= 3 / (LAYERS * CHOSEN)
    assert routing.counted(torch.device("cpu")).tolist() == [0.0, 0.0, 0.0]


def test_experts_of_another_model_are_refused(moe: PreTrainedModel) -> None:
    with pytest.raises(ShapeError, match="recorded for 7 tokens"):
        routing_of(moe).replay(torch.zeros(7, LAYERS + 1, CHOSEN, dtype=torch.int16), rows=7)


def test_a_dense_model_is_refused_by_name(tmp_path: Path) -> None:
    lm = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path))
    with pytest.raises(ConfigError, match=r"trainer\.routing_replay, model = \(True, 'Qwen3ForCausalLM, which has no experts'\)"):
        routing_of(lm)


def plain_block(hidden: Tensor, chosen: Tensor, parameters: dict[str, Tensor]) -> Tensor:
    """One block of experts, token by token and expert by expert."""
    rows = []
    for token, experts in zip(hidden, chosen.tolist(), strict=True):
        scores = torch.softmax(parameters["gate.weight"] @ token, dim=-1)
        share = sum(scores[expert] for expert in experts)
        row = torch.zeros_like(token)
        for expert in experts:
            gate, up = (parameters["experts.gate_up_proj"][expert] @ token).chunk(2)
            row = row + scores[expert] / share * (parameters["experts.down_proj"][expert] @ (silu(gate) * up))
        rows.append(row)
    return torch.stack(rows)


def test_values_and_gradients_are_those_of_a_plain_loop_over_the_recorded_experts(moe: PreTrainedModel) -> None:
    moe.double().set_experts_implementation("eager")  # the grouped product is for float32 and below
    routing = routing_of(moe)
    random = np.random.default_rng(0)
    experts = np.array([[random.choice(EXPERTS, CHOSEN, replace=False) for _ in range(LAYERS)] for _ in range(5)], np.int16)
    block = moe.model.layers[1].mlp
    hidden = torch.randn(5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    slope = torch.randn(5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    routing.replay(as_rows(experts), rows=5)
    parameters = dict(block.named_parameters())
    ours = block(hidden[None])[0]
    plain = plain_block(hidden, torch.from_numpy(experts[:, 1].astype(np.int64)), parameters)
    torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-7)
    wanted = [hidden, *parameters.values()]
    for name, ours_by, plain_by in zip(["hidden", *parameters], torch.autograd.grad((ours * slope).sum(), wanted),
                                       torch.autograd.grad((plain * slope).sum(), wanted), strict=True):
        assert plain_by.abs().max() > 1e-3, name
        # the router takes its softmax in float32
        torch.testing.assert_close(ours_by, plain_by, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
