from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from asyncrl.errors import ConfigError
from asyncrl.train.batch import PackedBatch, pack
from asyncrl.train.microbatch import Layout, build, layout
from asyncrl.train.model import ForwardInputs, Policy, load_policy
from asyncrl.types import SequenceBuilder
from tests.train.families import make_family
from tests.train.train_data import batch_of, first_gradient, inline_rank, random_batch, rollout, sequence

CPU = torch.device("cpu")


def whole_of(packed: PackedBatch, *, shared: bool = True) -> Layout:
    groups = packed.group_ids[packed.rollout_ids]
    return layout(packed.tokens, cu_seqlens=packed.cu_seqlens, targets=packed.loss_mask, temperatures=packed.temperatures,
                  group_ids=groups if shared else np.arange(len(groups)))


def packed_logprobs(policy: Policy, packed: PackedBatch, *, shared: bool = True) -> torch.Tensor:
    """[T] with gradient, 0 where nothing is predicted."""
    inputs = ForwardInputs.of(build(whole_of(packed, shared=shared), tuple(range(len(packed.temperatures)))), CPU)
    return torch.zeros(len(packed.tokens)).index_put((inputs.places,), policy(inputs)[0])


def separate_logprobs(folder: Path, packed: PackedBatch) -> tuple[torch.Tensor, torch.nn.Module]:
    """The same from transformers' own forward of each sequence alone."""
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    result = torch.zeros(len(packed.tokens))
    for n, temperature in enumerate(packed.temperatures.tolist()):
        start, end = packed.cu_seqlens[n], packed.cu_seqlens[n + 1]
        row = torch.from_numpy(packed.tokens[start:end].astype(np.int64))
        logprobs = torch.log_softmax(lm(input_ids=row[None], use_cache=False).logits[0, :-1] / temperature, dim=-1)
        result = result.index_put((torch.arange(start + 1, end),), logprobs.gather(1, row[1:, None])[:, 0])
    return torch.where(torch.from_numpy(packed.loss_mask), result, 0.0), lm


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("model", ["tiny", "untied"])
def test_packed_logprobs_and_gradients_equal_separate_sequences(model: str, shared: bool, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(model)
    packed = pack(random_batch(0, temperature=0.7))
    policy = load_policy(folder)
    ours, (theirs, lm) = packed_logprobs(policy, packed, shared=shared), separate_logprobs(folder, packed)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    factors = torch.linspace(-1, 1, len(ours))
    (ours * factors).sum().backward()
    (theirs * factors).sum().backward()
    for (name, parameter), (other_name, other) in zip(policy.lm.named_parameters(), lm.named_parameters(), strict=True):
        assert name == other_name
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_tied_weights_are_one_parameter_with_the_gradient_of_both_uses(tiny: Path, untied: Path) -> None:
    lm = load_policy(tiny).lm
    assert lm.get_output_embeddings().weight is lm.get_input_embeddings().weight
    two = AutoModelForCausalLM.from_pretrained(untied)
    two.load_state_dict(lm.state_dict())
    assert two.get_output_embeddings().weight is not two.get_input_embeddings().weight
    policies = Policy(lm), Policy(two)
    two.set_attn_implementation("asyncrl_packed")
    packed = pack(random_batch(1))
    for policy in policies:
        packed_logprobs(policy, packed).sum().backward()
    both = two.get_input_embeddings().weight.grad + two.get_output_embeddings().weight.grad
    torch.testing.assert_close(lm.get_input_embeddings().weight.grad, both, rtol=1e-4, atol=1e-5)


def test_a_sequence_sees_nothing_of_its_neighbours(tiny: Path) -> None:
    policy = load_policy(tiny)
    packed = pack(random_batch(2))
    before = packed_logprobs(policy, packed).detach()
    start = packed.cu_seqlens[-2]
    packed.tokens[start:] = (packed.tokens[start:] + 1) % 16
    after = packed_logprobs(policy, packed).detach()
    torch.testing.assert_close(before[:start], after[:start], rtol=0, atol=1e-5)
    assert not torch.allclose(before[start:], after[start:], atol=1e-3)


def test_learned_positions_are_counted_in_each_sequence_alone(tmp_path: Path) -> None:
    """Whatever lies before it in the row, and whether its prompt is computed for another one too."""
    folder = make_family("gpt2, learned positions", tmp_path)
    policy, packed = load_policy(folder), pack(random_batch(0))
    expected, _ = separate_logprobs(folder, packed)
    for shared in (True, False):
        torch.testing.assert_close(packed_logprobs(policy, packed, shared=shared), expected, rtol=0, atol=1e-5)


def test_tokens_the_policy_did_not_sample_are_never_predicted(untied: Path, tmp_path: Path) -> None:
    builder = SequenceBuilder([2, 3])
    for turn, tool in ((0, 14), (1, 15)):
        builder.sampled(np.array([4, 5], np.int32), logprobs=np.array([-2, -2], np.float32), policy_version=0, kv_fresh=True, turn=turn)
        builder.given([tool], turn=turn)
    batch = batch_of(rollout(0, 0, builder.build(), reward=1.0), rollout(0, 1, sequence([2, 3], [6]), reward=0.0))
    assert build(whole_of(pack(batch)), (0,)).places.tolist() == [2, 3, 5, 6]
    gradient = first_gradient(inline_rank(untied, tmp_path), batch)["model.embed_tokens.weight"]
    # 14 is context of later samples; nothing is sampled after 15
    assert gradient[14].abs().sum() > 0
    assert gradient[15].abs().sum() == 0


REFUSED = {
    "attention sinks": (transformers.GptOssConfig, transformers.GptOssForCausalLM, {"num_local_experts": 4, "head_dim": 8}, "logprobs off"),
    "positions by a bias of its own attention": (transformers.BloomConfig, transformers.BloomForCausalLM, {}, "BloomForCausalLM"),
    "attention of its own": (transformers.GPTNeoConfig, transformers.GPTNeoForCausalLM,
                             {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4}, "called from outside"),
    "recurrence": (transformers.MambaConfig, transformers.MambaForCausalLM, {}, "logprobs off"),
    "a choice of tokens to attend to": (transformers.DeepseekV32Config, transformers.DeepseekV32ForCausalLM, {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "kv_lora_rank": 16, "q_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
        "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4}, "DeepseekV32ForCausalLM .it fails without a mask, TypeError"),
    "layers that keep what they are given": (transformers.StableLmConfig, transformers.StableLmForCausalLM, {}, "StableLmAttention")}


@pytest.mark.parametrize("why", REFUSED)
def test_a_model_that_packing_would_change_is_refused(why: str, tmp_path: Path) -> None:
    config, model, settings, said = REFUSED[why]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        lm = model(config(vocab_size=16, hidden_size=32, num_hidden_layers=2, pad_token_id=0, eos_token_id=1,
                          **{"num_attention_heads": 4, "num_key_value_heads": 4, **settings}))
        for parameter in lm.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    lm.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=said):
        load_policy(tmp_path)


@pytest.mark.parametrize("rope", [
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 8},
])
def test_a_sequence_that_would_change_the_positions_of_others_is_refused(rope: dict, tmp_path: Path) -> None:
    config = LlamaConfig(vocab_size=16, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=4,
                         num_key_value_heads=2, max_position_embeddings=8, rope_parameters=rope | {"rope_theta": 1e4}, pad_token_id=0)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    policy = load_policy(tmp_path)
    within = pack(batch_of(rollout(0, 0, sequence([2, 3], [4] * 6)), rollout(1, 0, sequence([2], [3]))))
    expected, _ = separate_logprobs(tmp_path, within)
    torch.testing.assert_close(packed_logprobs(policy, within), expected, rtol=0, atol=1e-5)
    beyond = pack(batch_of(rollout(0, 0, sequence([2, 3], [4] * 8)), rollout(1, 0, sequence([2], [3]))))
    with pytest.raises(ConfigError, match="changes beyond 8 tokens"):
        packed_logprobs(policy, beyond)
