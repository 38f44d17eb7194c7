import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.correction import Correction
from asyncrl.correction.aggregate import Denominators
from asyncrl.errors import StalenessError
from asyncrl.train.batch import pack
from asyncrl.train.step import minibatches_of
from asyncrl.types import Status
from tests.train.train_data import batch_of, first_gradient, inline_rank, random_batch, rollout, sequence, step_on, weights


def assert_equal_gradients(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], *, tolerance: float) -> None:
    largest = max(float(gradient.abs().max()) for gradient in first.values())
    for name, gradient in first.items():
        torch.testing.assert_close(gradient, second[name], rtol=0, atol=tolerance * largest)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_any_split_into_microbatches_gives_the_same_gradient(aggregation: str, tiny: Path, tmp_path: Path) -> None:
    batch = random_batch(0)
    loss = {"kind": "decoupled_ppo", "aggregation": aggregation}
    whole, *splits = (first_gradient(inline_rank(tiny, tmp_path, loss=loss, microbatch_tokens=tokens), batch) for tokens in (4096, 60, 15))
    for split in splits:
        assert_equal_gradients(whole, split, tolerance=1e-6)


def test_order_of_rollouts_does_not_matter(tiny: Path, tmp_path: Path) -> None:
    batch = random_batch(1)
    backwards = batch_of(*reversed(batch.rollouts))
    first = first_gradient(inline_rank(tiny, tmp_path), batch)
    assert_equal_gradients(first, first_gradient(inline_rank(tiny, tmp_path), backwards), tolerance=1e-6)


def test_leaving_out_the_proximal_pass_changes_nothing(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without = first_gradient(inline_rank(tiny, tmp_path), random_batch(2))
    monkeypatch.setattr(Correction, "is_token_local", False)
    with_pass = first_gradient(inline_rank(tiny, tmp_path), random_batch(2))
    assert all(torch.equal(gradient, with_pass[name]) for name, gradient in without.items())


@pytest.mark.parametrize("microbatch_tokens", [4096, 40])
def test_current_over_proximal_is_exactly_one_before_the_first_update(microbatch_tokens: int, tiny: Path, tmp_path: Path,
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Correction, "is_token_local", False)
    metrics = step_on(inline_rank(tiny, tmp_path, microbatch_tokens=microbatch_tokens), random_batch(3)).metrics.result()
    assert metrics["correction/update_ratio/min"] == metrics["correction/update_ratio/max"] == 1.0


def test_later_updates_of_a_step_move_away_from_the_proximal_policy(tiny: Path, tmp_path: Path) -> None:
    rank = inline_rank(tiny, tmp_path, minibatches_per_step=2, epochs=2)
    metrics = step_on(rank, random_batch(4)).metrics.result()
    assert metrics["train/updates/sum"] == 4
    assert rank._trainee.optimizer.updates == 4
    assert metrics["correction/update_ratio/max"] > 1.0


def test_a_minibatch_takes_whole_groups(tiny: Path, tmp_path: Path) -> None:
    packed = pack(random_batch(5, groups=3))
    first, second = minibatches_of(inline_rank(tiny, tmp_path, minibatches_per_step=2)._trainee, packed)
    groups = packed.group_ids[packed.rollout_ids][packed.sequence_ids]
    tokens = [np.unique(groups[np.concatenate([inputs.places.numpy() for inputs in minibatch.inputs])]).tolist()
              for minibatch in (first, second)]
    assert tokens == [[0, 1], [2]]
    assert first.denominators + second.denominators == Denominators(num_loss_tokens=packed.num_loss_tokens, num_loss_sequences=12)


def test_the_denominator_counts_loss_tokens_alone(tiny: Path, tmp_path: Path) -> None:
    kept = [rollout(0, n, sequence([2, 3], [4, 5, 6, 7, 8][:n + 1]), reward=float(n % 2)) for n in range(5)]
    failed = rollout(0, 5, sequence([2, 3], [4] * 5), status=Status.REWARD_TIMEOUT)
    masked = rollout(0, 6, sequence([2, 3], [4] * 5).masked(), reward=0.0)
    (minibatch,) = minibatches_of(inline_rank(tiny, tmp_path)._trainee, pack(batch_of(*kept, failed, masked)))
    assert minibatch.denominators == Denominators(num_loss_tokens=15, num_loss_sequences=5)
    places = torch.cat([inputs.places for inputs in minibatch.inputs])
    assert len(places) == 15


def test_a_failed_rollout_changes_neither_gradient_nor_baseline(tiny: Path, tmp_path: Path) -> None:
    good = [rollout(0, n, sequence([2, 3], [4 + n, 5]), reward=float(n)) for n in range(3)]
    failed = rollout(0, 3, sequence([2, 3], [9, 9, 9]), status=Status.ENV_ERROR)
    without = first_gradient(inline_rank(tiny, tmp_path), batch_of(*good))
    assert_equal_gradients(without, first_gradient(inline_rank(tiny, tmp_path), batch_of(*good, failed)), tolerance=1e-6)


def all_masked() -> object:
    return batch_of(*(rollout(0, n, sequence([2, 3], [4, 5]).masked(), reward=float(n)) for n in range(2)))


def all_failed() -> object:
    return batch_of(*(rollout(0, n, sequence([2, 3], [4, 5]), status=Status.ENGINE_ERROR) for n in range(2)))


def no_tokens() -> object:
    return batch_of(rollout(0, 0, status=Status.PROMPT_TOO_LONG))


def equal_rewards() -> object:
    return batch_of(*(rollout(0, n, sequence([2, 3], [4 + n, 5]), reward=0.7) for n in range(3)))


@pytest.mark.parametrize("make", [all_masked, all_failed, no_tokens, equal_rewards])
def test_a_batch_without_gradient_is_skipped_and_counted(make: object, tiny: Path, tmp_path: Path) -> None:
    rank = inline_rank(tiny, tmp_path, weight_decay=0.1)
    step_on(rank, random_batch(6))
    before = weights(rank)
    outcome = step_on(rank, make())
    assert outcome.skipped
    assert not outcome.nonfinite
    assert outcome.trained_tokens == 0
    assert all(torch.equal(before[name], weight) for name, weight in weights(rank).items())
    result = outcome.metrics.result()
    assert all(np.isfinite(value) for value in result.values())
    if make is not equal_rewards:
        assert "train/entropy/mean" not in result


def test_a_gradient_that_is_not_finite_leaves_the_weights_alone(tiny: Path, tmp_path: Path) -> None:
    rank = inline_rank(tiny, tmp_path)
    with torch.no_grad():
        rank._lm.model.norm.weight[0] = float("nan")
    before = weights(rank)
    outcome = step_on(rank, random_batch(7))
    assert outcome.skipped
    assert outcome.nonfinite
    after = weights(rank)
    assert all(torch.equal(before[name].nan_to_num(9), after[name].nan_to_num(9)) for name in before)
    assert rank._trainee.optimizer.updates == 0


def test_a_token_newer_than_the_batch_is_an_error_before_anything_changes(tiny: Path, tmp_path: Path) -> None:
    rollouts = [rollout(0, n, sequence([2, 3], [4 + n, 5], version=1), reward=float(n)) for n in range(2)]
    with pytest.raises(StalenessError, match="newer than version 0"):
        pack(batch_of(*rollouts))
    rank = inline_rank(tiny, tmp_path)
    before = weights(rank)
    with pytest.raises(StalenessError, match="newer than version 0"):
        step_on(rank, dataclasses.replace(pack(batch_of(*rollouts, version=1)), version=0))
    assert all(torch.equal(before[name], weight) for name, weight in weights(rank).items())


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_logit_that_is_not_finite_is_never_stepped_on(value: float, updates: int, tiny: Path, tmp_path: Path) -> None:
    """−inf is the one that gives a finite gradient: the clamp of the ratio holds it back."""
    rank = inline_rank(tiny, tmp_path, epochs=updates)
    before = weights(rank)
    bias = torch.zeros(rank._lm.config.vocab_size)
    bias[5] = value
    rank._lm.get_output_embeddings().bias = torch.nn.Parameter(bias, requires_grad=False)
    outcome = step_on(rank, batch_of(*(rollout(0, n, sequence([2, 3], [4 + n, 6]), reward=float(n)) for n in range(3))))
    assert outcome.skipped
    assert outcome.nonfinite
    assert outcome.trained_tokens == 0
    after = weights(rank)
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())


def test_tokens_count_as_trained_where_their_update_was_applied(tiny: Path, tmp_path: Path) -> None:
    signal = [rollout(0, n, sequence([2, 3], [4 + n, 5]), reward=float(n)) for n in range(2)]
    equal = [rollout(1, n, sequence([2, 3], [4 + n, 5, 6]), reward=1.0) for n in range(2)]
    outcome = step_on(inline_rank(tiny, tmp_path, minibatches_per_step=2), batch_of(*signal, *equal))
    assert not outcome.skipped
    assert outcome.trained_tokens == 4

    broken = inline_rank(tiny, tmp_path, minibatches_per_step=2)
    calls = itertools.count()
    # two proximal forwards, the first update, then the second
    broken._lm.base_model.norm.register_forward_hook(
        lambda _module, _inputs, hidden: hidden * (float("nan") if next(calls) == 3 else 1.0))
    differing = [rollout(1, n, sequence([2, 3], [4 + n, 5, 6]), reward=float(n)) for n in range(2)]
    outcome = step_on(broken, batch_of(*signal, *differing))
    assert outcome.nonfinite
    assert not outcome.skipped
    assert outcome.trained_tokens == 4


def test_the_ratio_is_taken_at_the_temperature_of_the_sample(tiny: Path, tmp_path: Path) -> None:
    rank = inline_rank(tiny, tmp_path)
    packed = pack(random_batch(8, temperature=0.6))
    (minibatch,) = minibatches_of(rank._trainee, packed)
    for inputs in minibatch.inputs:
        with torch.no_grad():
            packed.rollout_logprobs[inputs.places.numpy()] = rank._trainee.policy(inputs)[0].numpy()
    assert step_on(rank, packed).metrics.result()["correction/logprob_gap/max"] == pytest.approx(0.0, abs=1e-6)
    packed.temperatures[:] = 1.0
    assert step_on(rank, packed).metrics.result()["correction/logprob_gap/max"] > 0.1


def test_entropy_is_a_mean_over_loss_tokens(tiny: Path, tmp_path: Path) -> None:
    rank = inline_rank(tiny, tmp_path)
    with torch.no_grad():
        rank._lm.model.norm.weight.zero_()
    metrics = step_on(rank, random_batch(9)).metrics.result()
    assert metrics["train/entropy/mean"] == pytest.approx(np.log(16), abs=1e-5)


def test_ppo_anchors_at_the_policy_that_sampled(tiny: Path, tmp_path: Path) -> None:
    """Samples half as likely as under the current weights: the ratio is 2, clipped where the advantage is positive."""
    rank = inline_rank(tiny, tmp_path, loss="ppo", correction="none")
    packed = pack(random_batch(10))
    (minibatch,) = minibatches_of(rank._trainee, packed)
    for inputs in minibatch.inputs:
        with torch.no_grad():
            packed.rollout_logprobs[inputs.places.numpy()] = rank._trainee.policy(inputs)[0].numpy() - np.log(2.0).astype(np.float32)
    rewarded = (packed.rewards == 1.0)[packed.rollout_ids[packed.sequence_ids]] & packed.loss_mask
    metrics = step_on(rank, packed).metrics.result()
    assert metrics["correction/update_ratio/max"] == pytest.approx(2.0, rel=1e-4)
    assert metrics["correction/clipped/frac"] == pytest.approx(rewarded.sum() / packed.num_loss_tokens)
    by_age = [name for name in metrics if name.startswith("correction/clipped_staleness_")]
    assert len(by_age) == len(np.unique(packed.version - packed.policy_versions[packed.loss_mask]))
