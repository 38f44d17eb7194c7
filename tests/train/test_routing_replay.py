"""Experts that an engine recorded, repeated in the trainer's forward: the mismatch falls to that of a model without a choice."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.errors import ConfigError, ShapeError
from asyncrl.paths import RunPaths
from asyncrl.records import NO_EXPERT, TokenRecords, Wanted
from asyncrl.rollout.engine import GenerationRequest, Interruption
from asyncrl.rollout.inline_engine import InlineEngine
from asyncrl.train.config import validated
from asyncrl.train.trainer import Trainer
from asyncrl.types import Batch, Sampling, Sequence, SequenceBuilder
from asyncrl.weights.config import WeightsConfig
from tests.tiny_moe import CHOSEN, EXPERTS, LAYERS, make_tiny_moe
from tests.train.train_data import batch_of, first_gradient, inline_rank, rollout, step_on


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_moe(tmp_path_factory.mktemp("moe"))


async def gaps(model: Path, folder: Path, *, replay: bool) -> np.ndarray:
    """Trainer − engine logprobs of 1,000 tokens and more: engine in bfloat16, trainer in float32, both of the same bfloat16 weights."""
    torch.set_num_threads(1)
    paths = RunPaths(folder / "run", folder / "shared")
    paths.make()
    trainer, engine = Trainer(model, learning_rate=1e-3, processes=0, routing_replay=replay), InlineEngine(model, dtype="bfloat16")
    await trainer.start(paths, weights=WeightsConfig(dtype="bfloat16"))
    await engine.start(paths)
    manifest = await trainer.publish()
    await engine.pause(Interruption.DRAIN)
    await engine.apply(manifest)
    await engine.resume()

    async def one(seed: int) -> Sequence:
        prompt = np.random.default_rng(seed).integers(2, 16, 6).astype(np.int32)
        builder = SequenceBuilder(prompt)
        async for chunk in engine.generate(GenerationRequest(str(seed), prompt, Sampling(max_new_tokens=32), seed=seed,
                                                             wanted=Wanted(routed_experts=replay))):
            builder.sampled(chunk.tokens, logprobs=chunk.logprobs, policy_version=0, kv_fresh=True, turn=0, records=chunk.records)
        return builder.build()

    sequences = await asyncio.gather(*(one(seed) for seed in range(64)))
    scored = await trainer.score(sequences)
    await engine.close()
    await trainer.close()
    return np.concatenate([(scores - sequence.rollout_logprobs)[sequence.policy_versions >= 0]
                           for scores, sequence in zip(scored, sequences, strict=True)]).astype(np.float64)


def test_the_mismatch_falls_to_that_of_a_model_without_a_choice(moe: Path, tmp_path: Path) -> None:
    """Seen: |Δ| 0.030 → 0.012 in the mean, 2.4 → 0.10 at most, k3 4.9e-3 → 1.6e-4; with two experts of two 0.010, 0.11 and 1.2e-4."""
    without_a_choice = make_tiny_moe(tmp_path / "two", experts=2)
    own = asyncio.run(gaps(moe, tmp_path / "own", replay=False))
    replayed = asyncio.run(gaps(moe, tmp_path / "replayed", replay=True))
    level = asyncio.run(gaps(without_a_choice, tmp_path / "level", replay=False))

    def k3(log_ratio: np.ndarray) -> float:
        return float(np.mean(np.expm1(log_ratio) - log_ratio))

    assert np.abs(own).max() > 1.0 > 5 * np.abs(replayed).max(), "a token sent elsewhere"
    assert np.abs(replayed).mean() < 0.6 * np.abs(own).mean()
    assert k3(replayed) < 0.1 * k3(own)
    assert np.abs(replayed).mean() < 1.5 * np.abs(level).mean()
    assert k3(replayed) < 2.0 * k3(level)


def routed(prompt: list[int], completion: list[int], *, seed: int, known: slice = slice(None)) -> Sequence:
    """With experts at random for every token that is an input, or for some of them."""
    random = np.random.default_rng(seed)
    inputs = len(prompt) + len(completion) - 1
    experts = np.full((inputs, LAYERS, CHOSEN), NO_EXPERT, np.int16)
    chosen = np.stack([[random.choice(EXPERTS, CHOSEN, replace=False) for _ in range(LAYERS)] for _ in range(inputs)]).astype(np.int16)
    experts[known] = chosen[known]
    builder = SequenceBuilder(prompt)
    builder.sampled(np.array(completion, np.int32), logprobs=np.full(len(completion), -2.0, np.float32), policy_version=0, kv_fresh=True,
                    turn=0, records=TokenRecords(experts=experts))
    return builder.build()


def batch(known: slice = slice(None)) -> Batch:
    return batch_of(rollout(0, 0, routed([4, 7, 7], [5, 11, 6], seed=1, known=known), reward=1.0),
                    rollout(0, 1, routed([4, 7, 7], [9, 2], seed=1, known=known)))


def test_a_step_counts_what_it_replayed_and_what_would_have_gone_elsewhere(moe: Path, tmp_path: Path) -> None:
    """Rows: three of the shared prompt, two and one of the completions. Half of what is at random lies where the router sends it not."""
    metrics = step_on(inline_rank(moe, tmp_path, routing_replay=True), batch()).metrics.result()
    assert metrics["train/routing_replayed/frac"] == 1.0
    assert 0.4 < metrics["train/routing_flips/frac"] <= 1.0
    metrics = step_on(inline_rank(moe, tmp_path, routing_replay=True), batch(slice(3, None))).metrics.result()
    assert metrics["train/routing_replayed/frac"] == 3 / 6, "the prompt has no record"
    metrics = step_on(inline_rank(moe, tmp_path), batch()).metrics.result()
    assert "train/routing_replayed/frac" not in metrics


def test_logprobs_are_those_of_a_forward_with_these_experts_and_the_step_trains_on_them(moe: Path, tmp_path: Path) -> None:
    tokens = step_on(inline_rank(moe, tmp_path, routing_replay=True, epochs=2), batch()).tokens
    plain = step_on(inline_rank(moe, tmp_path, epochs=2), batch()).tokens
    assert (tokens.proximal_logprobs - plain.proximal_logprobs)[tokens.loss_mask].abs().min() > 1e-3
    one = inline_rank(moe, tmp_path, routing_replay=True, epochs=2, learning_rate=1e-30)
    metrics = step_on(one, batch()).metrics.result()
    assert (metrics["correction/update_ratio/min"], metrics["correction/update_ratio/max"]) == (1.0, 1.0)


@pytest.mark.parametrize("loss", ["decoupled_ppo", "gspo"])
@pytest.mark.parametrize("how", ["full", "selective"])
def test_activations_that_are_computed_again_are_sent_the_same_way(moe: Path, tmp_path: Path, how: str, loss: str) -> None:
    kept = first_gradient(inline_rank(moe, tmp_path, routing_replay=True, loss=loss), batch())
    again = first_gradient(inline_rank(moe, tmp_path, routing_replay=True, activation_checkpointing=how, loss=loss), batch())
    assert any("gate.weight" in name and gradient.abs().max() > 1e-4 for name, gradient in kept.items()), "the routers learn"
    for name, gradient in kept.items():
        torch.testing.assert_close(again[name], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_split_into_micro_batches_does_not_move_the_gradient(moe: Path, tmp_path: Path, seed: int) -> None:
    """Sequences of a group share their prompt's rows in one forward, and have rows of their own in two, or wherever engines sent the
    prompt elsewhere."""
    group = batch_of(rollout(0, 0, routed([4, 7, 7], [5, 11, 6], seed=1), reward=1.0), rollout(0, 1, routed([4, 7, 7], [9, 2], seed=seed)))
    one = first_gradient(inline_rank(moe, tmp_path, routing_replay=True), group)
    two = first_gradient(inline_rank(moe, tmp_path, routing_replay=True, microbatch_tokens=5), group)
    for name, gradient in one.items():
        torch.testing.assert_close(two[name], gradient, rtol=1e-4, atol=1e-6)


def test_two_ranks_replay_what_one_does(moe: Path, tmp_path: Path) -> None:
    """Sharded by FSDP2, micro-batches spread, a dummy among them."""
    rollouts = [rollout(group, index, routed([4 + group, 7, 7], list(range(2, 5 + index)), seed=10 * group + index), reward=float(index))
                for group in range(3) for index in range(2)]

    async def step(processes: int) -> tuple[dict[str, float], list[np.ndarray]]:
        paths = RunPaths(tmp_path / f"run{processes}", tmp_path / f"shared{processes}")
        paths.make()
        trainer = Trainer(moe, learning_rate=1e-3, processes=processes, routing_replay=True, microbatch_tokens=8, epochs=2)
        await trainer.start(paths)
        try:
            metrics = (await trainer.step(batch_of(*rollouts))).metrics.result()
            return metrics, await trainer.score([sequence for each in rollouts for sequence in each.sequences])
        finally:
            await trainer.close()

    (one, scored), (two, scored_by_two) = asyncio.run(step(0)), asyncio.run(step(2))
    assert one["train/routing_replayed/frac"] == two["train/routing_replayed/frac"] == 1.0
    for name in ("train/routing_flips/frac", "train/loss/mean", "train/grad_norm/last", "correction/logprob_gap/mean"):
        assert two[name] == pytest.approx(one[name], rel=1e-5), name
    for ours, theirs in zip(scored, scored_by_two, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_experts_of_another_model_and_models_without_any_are_refused(moe: Path, tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.routing_replay, model"):
        inline_rank(tiny, tmp_path, routing_replay=True)
    builder = SequenceBuilder([4, 7])
    builder.sampled(np.array([5], np.int32), logprobs=np.array([-2.0], np.float32), policy_version=0, kv_fresh=True, turn=0,
                    records=TokenRecords(experts=np.zeros((2, LAYERS + 1, CHOSEN), np.int16)))
    with pytest.raises(ShapeError, match="the model has 2 layers that choose 2"):
        step_on(inline_rank(moe, tmp_path, routing_replay=True),
                batch_of(rollout(0, 0, builder.build(), reward=1.0), rollout(0, 1, builder.build())))


def test_a_compiled_layer_is_refused_with_both_names() -> None:
    with pytest.raises(ConfigError) as error:
        validated({"trainer": {"learning_rate": 1e-3, "compile": True, "routing_replay": True}})
    assert error.value.field == "trainer.compile, trainer.routing_replay"
