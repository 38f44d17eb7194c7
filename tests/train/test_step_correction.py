"""Corrections inside a step: over sequences and the whole batch, denominators of what is kept, proximal logprobs that are guessed."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.train.batch import PackedBatch, pack
from asyncrl.train.step import minibatches_of
from asyncrl.types import Batch
from tests.train.train_data import batch_of, first_gradient, inline_rank, random_batch, rollout, sequence, step_on, weights

GEOMETRIC = {"kind": "geometric", "low": 0.004, "high": 0.3}
"""The made-up rollouts are far from the tiny model: this keeps some of their sequences and drops others, on both sides."""
SEQUENCES = {"kind": "custom", "level": "sequence", "reduce": "mean", "truncate_high": 0.05, "normalize": "sequence",
             "reject": [GEOMETRIC, "second_moment"], "denominator": "kept"}
NOTHING_KEPT = {"kind": "custom", "reject": [{"kind": "veto", "low": 1.0}, {"kind": "geometric", "low": 1e6, "high": 1e7}]}
LOG_LINEAR = {"kind": "custom", "truncate_high": 2.0, "proximal": "log_linear"}


def stale_batch(seed: int) -> PackedBatch:
    """Rollouts of versions 0 to 3 for a step from version 3."""
    packed = pack(random_batch(seed, version=0))
    age = np.random.default_rng(seed).integers(0, 4, len(packed.rewards))[packed.rollout_ids[packed.sequence_ids]]
    return dataclasses.replace(packed, version=3, policy_versions=np.where(packed.loss_mask, age, packed.policy_versions).astype(np.int32))


@pytest.mark.parametrize("loss", ["gspo", "decoupled_ppo", {"kind": "reinforce", "aggregation": "seq_mean_token_mean"}])
def test_a_correction_of_the_whole_batch_is_the_same_for_every_split_and_order(loss: object, tiny: Path, tmp_path: Path) -> None:
    batch = random_batch(0)
    backwards = batch_of(*reversed(batch.rollouts))

    def gradient(of: Batch, tokens: int) -> dict[str, torch.Tensor]:
        return first_gradient(inline_rank(tiny, tmp_path, correction=SEQUENCES, loss=loss, microbatch_tokens=tokens), of)

    whole = gradient(batch, 4096)
    largest = max(float(value.abs().max()) for value in whole.values())
    assert largest > 0
    for other in (gradient(batch, 60), gradient(batch, 15), gradient(backwards, 40)):
        for name, value in whole.items():
            torch.testing.assert_close(value, other[name], rtol=0, atol=1e-6 * largest)


def test_rejected_sequences_count_neither_as_trained_nor_in_a_kept_denominator(tiny: Path, tmp_path: Path) -> None:
    batch = random_batch(1)
    dropping = {"kind": "custom", "level": "none", "reject": [GEOMETRIC]}
    original, kept = (step_on(inline_rank(tiny, tmp_path, correction=dropping | {"denominator": of}), batch) for of in ("original", "kept"))
    tokens, share = pack(batch).num_loss_tokens, original.metrics.result()["correction/kept/frac"]
    assert 0 < share < 1
    assert original.trained_tokens == kept.trained_tokens == round(share * tokens)
    first, second = original.metrics.result(), kept.metrics.result()
    assert second["train/grad_norm/last"] == pytest.approx(first["train/grad_norm/last"] / share, rel=1e-4)
    assert second["train/loss/mean"] == pytest.approx(first["train/loss/mean"] / share, rel=1e-4)


def test_a_rejected_sequence_pulls_nowhere(tiny: Path, tmp_path: Path) -> None:
    """The same gradient as with the rejected sequences masked, their rewards still in the baseline, over the same denominator."""
    packed = pack(random_batch(2))
    correction = {"kind": "custom", "level": "none", "reject": [GEOMETRIC], "denominator": "kept"}
    rank = inline_rank(tiny, tmp_path, correction=correction, loss="gspo")
    rejecting = first_gradient(rank, packed)
    scored = np.zeros(len(packed.tokens), np.float32)
    untrained = inline_rank(tiny, tmp_path, correction="none", loss="gspo")
    for minibatch in minibatches_of(untrained._trainee, packed):
        for inputs in minibatch.inputs:
            with torch.no_grad():
                scored[inputs.places.numpy()] = untrained._trainee.policy(inputs)[0].numpy()
    gaps = np.where(packed.loss_mask, scored - packed.rollout_logprobs, 0.0)
    means = np.exp(np.add.reduceat(gaps, packed.cu_seqlens[:-1]) / np.add.reduceat(packed.loss_mask, packed.cu_seqlens[:-1]))
    inside = (means >= GEOMETRIC["low"]) & (means <= GEOMETRIC["high"])
    assert 0 < inside.sum() < len(inside)
    masked = dataclasses.replace(packed, loss_mask=packed.loss_mask & inside[packed.sequence_ids])
    for name, value in first_gradient(untrained, masked).items():
        torch.testing.assert_close(rejecting[name], value, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("denominator", ["original", "kept"])
@pytest.mark.parametrize("loss", ["decoupled_ppo", "gspo"])
def test_a_batch_of_which_nothing_is_kept_moves_nothing_and_is_counted(loss: str, denominator: str, tiny: Path, tmp_path: Path) -> None:
    rank = inline_rank(tiny, tmp_path, correction=NOTHING_KEPT | {"denominator": denominator}, loss=loss, weight_decay=0.1)
    before = weights(rank)
    outcome = step_on(rank, random_batch(3))
    result = outcome.metrics.result()
    assert outcome.skipped
    assert not outcome.nonfinite
    assert outcome.trained_tokens == 0
    assert (result["train/updates/sum"], result["train/updates_zero/sum"], result["correction/kept/frac"]) == (0, 1, 0)
    assert all(np.isfinite(value) for value in result.values())
    assert all(torch.equal(before[name], weight) for name, weight in weights(rank).items())


def test_log_linear_with_one_update_is_recompute_to_the_bit(tiny: Path, tmp_path: Path) -> None:
    guessed, computed = (first_gradient(inline_rank(tiny, tmp_path, correction=LOG_LINEAR | {"proximal": kind}), stale_batch(4))
                         for kind in ("log_linear", "recompute"))
    assert all(torch.equal(gradient, computed[name]) for name, gradient in guessed.items())


@pytest.mark.parametrize(("correction", "passes"), [(LOG_LINEAR, 0), (LOG_LINEAR | {"proximal": "recompute"}, 1)])
def test_a_guess_costs_no_pass_and_measures_no_mismatch(correction: object, passes: int, tiny: Path, tmp_path: Path) -> None:
    rank = inline_rank(tiny, tmp_path, correction=correction, epochs=2)
    calls = []
    rank._lm.base_model.norm.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    result = step_on(rank, stale_batch(5)).metrics.result()
    assert calls == [False] * passes + [True] * 2
    measured = {name for name in result if name.startswith("correction/")}
    assert (measured == {"correction/clipped/frac"}) == (passes == 0)
    assert result["train/updates/sum"] == 2


def test_tokens_of_log_linear_steps_all_count_as_trained(tiny: Path, tmp_path: Path) -> None:
    packed = stale_batch(6)
    assert step_on(inline_rank(tiny, tmp_path, correction=LOG_LINEAR, epochs=2), packed).trained_tokens == packed.num_loss_tokens


def test_bounds_by_staleness_hold_each_token_to_its_own(tiny: Path, tmp_path: Path) -> None:
    """Fresh tokens have no room at all, those of an older version any: only the old ones are trained."""
    rollouts = [rollout(group, n, sequence([2, 3], [4 + n, 5], version=group), reward=float(n)) for group in range(2) for n in range(2)]
    correction = {"kind": "custom", "mask_low": [1e5, 1e-8], "mask_high": [1e6, 1e8]}
    outcome = step_on(inline_rank(tiny, tmp_path, correction=correction), batch_of(*rollouts, version=1))
    assert outcome.trained_tokens == 4
