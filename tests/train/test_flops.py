import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Gemma3Config, Gemma3TextConfig, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from asyncrl.train.flops import ModelFlops


@pytest.mark.parametrize("chosen", [None, 1, 4])
@pytest.mark.parametrize("tie", [True, False])
def test_the_count_is_what_torch_counts(tie: bool, chosen: int | None) -> None:
    """Of a forward and backward on a length where attention is a visible part; torch counts the masked half of the pairs too."""
    torch.manual_seed(0)
    settings = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": tie, "attn_implementation": "eager"}
    if chosen is None:
        lm = Qwen3ForCausalLM(config := Qwen3Config(**settings))
    else:
        config = Qwen3MoeConfig(**settings, num_experts=8, num_experts_per_tok=chosen, moe_intermediate_size=24,
                                experts_implementation="eager")
        lm = Qwen3MoeForCausalLM(config)
    length = 96
    with FlopCounterMode(display=False) as counted:
        lm(input_ids=torch.randint(0, 64, (1, length)), use_cache=False).logits.sum().backward()
    flops = ModelFlops.of(config, shapes=[parameter.shape for parameter in lm.parameters()])
    ours = flops.training(tokens=length, predictions=length, lengths=[length])
    hidden_half = 3.0 * flops.pair * (length * length - length * (length + 1) // 2)
    assert ours + hidden_half == pytest.approx(counted.get_total_flops(), rel=0.01)
    assert 3.0 * flops.pair * length * length > 0.1 * ours


def test_of_a_model_that_also_sees_it_is_the_text_model_that_counts() -> None:
    text = Gemma3TextConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=8)
    assert ModelFlops.of(Gemma3Config(text_config=text), shapes=[(100, 100)]) == ModelFlops.of(text, shapes=[(100, 100)])
