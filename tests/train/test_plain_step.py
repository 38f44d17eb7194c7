"""Packing, shared prompt rows, per-sequence attention, micro-batches and minibatches against the same step written plainly."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from asyncrl.errors import ShapeError
from asyncrl.types import Batch, Rollout, Sequence, SequenceBuilder, Status
from tests.tiny_model import make_tiny_model
from tests.train.plain_step import CLIP_HIGH, CLIP_LOW, EPS, GEOMETRIC, LEARNING_RATE, MAX_TOKENS, PlainStep, plain_step
from tests.train.train_data import batch_of, inline_rank, rollout, step_on, weights

VERSION = 3
"""The step trains from it; turns are up to so many steps old."""
MODELS = ("qwen3 tied", "qwen3 untied", "llama tied", "llama untied", "qwen2 tied", "qwen2 untied")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Grouped-query attention in all; Qwen2 has biases, Qwen3 norms on queries and keys."""
    root = tmp_path_factory.mktemp("families")
    found = {f"qwen3 {kind}": make_tiny_model(root / f"qwen3 {kind}", tie=kind == "tied") for kind in ("tied", "untied")}
    for family, config, model in (("llama", LlamaConfig, LlamaForCausalLM), ("qwen2", Qwen2Config, Qwen2ForCausalLM)):
        for kind in ("tied", "untied"):
            found[f"{family} {kind}"] = _save(config, model, root / f"{family} {kind}", tie=kind == "tied")
    return found


def _save(config: type[PretrainedConfig], model: type[PreTrainedModel], folder: Path, *, tie: bool) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        lm = model(config(vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                          num_key_value_heads=1, max_position_embeddings=256, tie_word_embeddings=tie, dtype="float32"))
        for name, parameter in lm.named_parameters():
            # wide, biases and norms included, so that no term is too small to be seen
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.15)
    lm.save_pretrained(folder)
    return folder


def tangled_batch(random: np.random.Generator, *, forks: bool) -> Batch:
    """Groups of 1 to 5, some with one and the same prompt; environment tokens inside, failures; with forks masked and empty rows too."""
    common = random.integers(0, 16, int(random.integers(1, 9))).tolist()
    rollouts: list[Rollout] = []
    for group in random.permutation(int(random.integers(1, 6))).tolist():
        prompt = common if random.random() < 0.4 else random.integers(0, 16, int(random.integers(1, 12))).tolist()
        temperature = float(random.choice([0.5, 1.0, 1.7]))
        for index in range(int(random.integers(1, 6))):
            sequences = [_several_turns(random, prompt)]
            if forks and random.random() < 0.3:
                sequences.append(_several_turns(random, prompt[:max(1, len(prompt) - 2)]))
            if forks and random.random() < 0.1:
                sequences.append(_several_turns(random, prompt).masked())
            if forks and random.random() < 0.1:
                sequences.append(SequenceBuilder(prompt).build())
            status = Status.REWARD_ERROR if random.random() < 0.15 else Status.STOP
            rollouts.append(rollout(7 * group + 3, index, *sequences, reward=float(random.choice([0.0, 0.3, 1.0])), status=status,
                                    temperature=temperature))
    return batch_of(*rollouts, version=VERSION)


def _several_turns(random: np.random.Generator, prompt: list[int]) -> Sequence:
    builder = SequenceBuilder(prompt)
    turns = int(random.integers(1, 4))
    for turn in range(turns):
        count = int(random.integers(1, 8))
        builder.sampled(random.integers(0, 16, count).astype(np.int32), logprobs=random.normal(-2.5, 0.8, count).astype(np.float32),
                        policy_version=int(random.integers(0, VERSION + 1)), kv_fresh=True, turn=turn)
        if turn < turns - 1 or random.random() < 0.3:
            builder.given(random.integers(0, 16, int(random.integers(1, 5))).tolist(), turn=turn)
    return builder.build()


CORRECTIONS = {
    "token_tis": "token_tis", "icepop": "icepop", "none": "none",
    "log_linear": {"kind": "custom", "truncate_high": 2.0, "proximal": "log_linear"},
    "geometric_kept": {"kind": "custom", "level": "sequence", "reduce": "mean", "truncate_high": 0.6, "denominator": "kept",
                       "reject": [{"kind": "geometric", "low": GEOMETRIC[0], "high": GEOMETRIC[1]}]}}


def any_settings(random: np.random.Generator) -> PlainStep:
    loss = str(random.choice(["decoupled_ppo", "decoupled_ppo", "ppo", "reinforce", "gspo"]))
    return PlainStep(
        advantages=str(random.choice(["grpo", "dr_grpo", "rloo"])), loss=loss,
        correction="none" if loss == "ppo" else str(random.choice(list(CORRECTIONS))),
        aggregation=str(random.choice(["token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_mean", "dr_grpo"])),
        minibatches_per_step=int(random.choice([1, 2])), epochs=int(random.choice([1, 2])), max_grad_norm=float(random.choice([1e9, 0.5])))


@pytest.mark.parametrize("seed", range(48))
def test_a_step_equals_one_written_plainly(seed: int, models: dict[str, Path], tmp_path: Path) -> None:
    random = np.random.default_rng(seed)
    folder, how = models[MODELS[seed % len(MODELS)]], any_settings(random)
    batch = tangled_batch(random, forks=how.aggregation.startswith("token"))
    if not any(sequence.loss_mask.any() for r in batch.rollouts if not r.status.is_error for sequence in r.sequences):
        pytest.fail("the seed makes a batch without loss tokens: nothing is compared")
    plain = plain_step(folder, batch, how)
    loss = {"kind": how.loss, "aggregation": how.aggregation, "max_tokens": MAX_TOKENS if how.aggregation == "dr_grpo" else None}
    loss |= {} if how.loss == "reinforce" else {"clip_low": CLIP_LOW, "clip_high": CLIP_HIGH}
    rank = inline_rank(folder, tmp_path, advantages=how.advantages, correction=CORRECTIONS[how.correction], loss=loss, eps=EPS,
                       learning_rate=LEARNING_RATE, minibatches_per_step=how.minibatches_per_step, epochs=how.epochs,
                       max_grad_norm=how.max_grad_norm,
                       microbatch_tokens=int(random.choice([1, 20, 60, 4096])))
    outcome = step_on(rank, batch)
    assert outcome.skipped == (max(plain.grad_norms) == 0.0)
    metrics = outcome.metrics.result()
    assert metrics["train/grad_norm/last"] == pytest.approx(plain.grad_norms[-1], rel=1e-5)
    if len(plain.losses) == 1:
        assert metrics["train/loss/mean"] == pytest.approx(plain.losses[0], rel=1e-4, abs=1e-6)
    start = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).named_parameters())
    moved = max(float((plain.weights[name] - before).detach().abs().max()) for name, before in start.items())
    for name, parameter in rank._lm.named_parameters():
        torch.testing.assert_close(parameter.double(), plain.weights[name], rtol=0, atol=1e-3 * moved + 1e-7)


@pytest.mark.parametrize("aggregation", ["seq_mean_token_sum", "seq_mean_token_mean", "dr_grpo"])
def test_a_forked_rollout_is_refused_where_it_would_weigh_more_than_one(aggregation: str, models: dict[str, Path], tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    rows = [_several_turns(random, [3, 4]) for _ in range(3)]
    forked = batch_of(rollout(5, 0, rows[0], rows[1], reward=1.0), rollout(5, 1, rows[2]), version=VERSION)
    rank = inline_rank(models[MODELS[0]], tmp_path, loss={"kind": "decoupled_ppo", "aggregation": aggregation,
                                                          "max_tokens": 8 if aggregation == "dr_grpo" else None})
    before = weights(rank)
    with pytest.raises(ShapeError, match="rollout 0 of the batch has 2"):
        step_on(rank, forked)
    assert all(torch.equal(before[name], after) for name, after in weights(rank).items())
