import math

import pytest
import torch

from asyncrl.correction import Correction, CorrectionBatch, LossInputs, correct, weigh
from asyncrl.correction.losses import decoupled_ppo
from asyncrl.correction.proximal import linear_in_probability, log_linear, log_linear_alpha
from asyncrl.errors import ConfigError, ShapeError
from tests.correction.loss_inputs import loss_inputs

TIS = Correction(proximal="log_linear", truncate_high=2.0)


def test_alpha_is_the_share_of_the_way_from_the_sampling_version_to_the_current_one() -> None:
    versions = torch.tensor([3, 5, 7, 4, 8, -1, 9])
    torch.testing.assert_close(log_linear_alpha(versions, proximal_version=7, current_version=8),
                               torch.tensor([0.8, 2 / 3, 0.0, 0.75, 0.0, 0.0, 0.0]))


def test_in_the_first_update_of_a_step_proximal_and_current_are_the_same() -> None:
    versions = torch.tensor([3, 6, 7])
    assert log_linear_alpha(versions, proximal_version=7, current_version=7).tolist() == [1.0, 1.0, 0.0]
    half = log_linear_alpha(versions, proximal_version=7, current_version=7.5)
    torch.testing.assert_close(half, torch.tensor([4 / 4.5, 1 / 1.5, 0.0]))


def test_the_gradient_is_that_of_the_whole_ratio_whatever_alpha() -> None:
    rollout = torch.full((4,), -1.0, dtype=torch.float64)
    logprobs = torch.tensor([-0.9, -1.1, -0.95, -1.0], dtype=torch.float64, requires_grad=True)
    alpha, mask = torch.tensor([0.0, 0.5, 1.0, 0.3], dtype=torch.float64), torch.ones(4, dtype=torch.bool)
    guess = log_linear(logprobs, rollout_logprobs=rollout, alpha=alpha, loss_mask=mask, correction=TIS)
    torch.testing.assert_close(guess.logprobs, rollout + alpha * (logprobs.detach() - rollout))
    inputs = loss_inputs(torch.ones(4, dtype=torch.float64), proximal_logprobs=guess.logprobs, rollout_logprobs=rollout,
                         weights=guess.weights)
    decoupled_ppo(logprobs, inputs=inputs).losses.sum().backward()
    torch.testing.assert_close(logprobs.grad, -(logprobs.detach() - rollout).exp())


def test_weights_are_truncated_and_garbage_under_the_mask_is_not_seen() -> None:
    guess = log_linear(torch.tensor([0.0, math.nan]), rollout_logprobs=torch.tensor([-3.0, math.inf]), alpha=torch.tensor([1.0, 1.0]),
                       loss_mask=torch.tensor([True, False]), correction=TIS)
    assert guess.weights.tolist() == [2.0, 0.0]
    assert guess.logprobs.tolist() == [0.0, 0.0]
    unweighted = log_linear(torch.tensor([0.0]), rollout_logprobs=torch.tensor([-3.0]), alpha=torch.tensor([1.0]),
                            loss_mask=torch.tensor([True]), correction=Correction(proximal="log_linear", level="none"))
    assert unweighted.weights.tolist() == [1.0]


def test_linear_in_probability_meets_both_ends() -> None:
    rollout, current = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-0.4, -0.4, -0.4])
    got = linear_in_probability(current, rollout_logprobs=rollout, alpha=torch.tensor([0.0, 1.0, 0.5]))
    torch.testing.assert_close(got, torch.tensor([-1.0, -0.4, math.log(0.5 * math.exp(-1.0) + 0.5 * math.exp(-0.4))]))


def test_a_correction_that_guesses_gives_alpha_and_measures_no_mismatch() -> None:
    batch = _batch(torch.tensor([-1.0, -0.5]))
    result = correct(batch, TIS)
    torch.testing.assert_close(result.alpha, torch.tensor([2 / 3, 0.0]))
    assert result.weights.tolist() == [1.0, 1.0]
    assert result.metrics.result() == {}
    assert weigh(batch, Correction()).alpha is None


def test_guessed_logprobs_are_refused_where_true_ones_are_needed() -> None:
    guess = log_linear(torch.tensor([-1.0, -0.5]), rollout_logprobs=torch.tensor([-1.0, -0.5]), alpha=torch.ones(2),
                       loss_mask=torch.tensor([True, True]), correction=TIS)
    with pytest.raises(ShapeError, match=r"proximal_logprobs is a LogLinear.*a guess"):
        _batch(guess)


def test_unequal_shapes_are_refused() -> None:
    with pytest.raises(ShapeError):
        log_linear(torch.zeros(2), rollout_logprobs=torch.zeros(2), alpha=torch.zeros(3), correction=TIS,
                   loss_mask=torch.ones(2, dtype=torch.bool))


def _batch(proximal: object) -> CorrectionBatch:
    return CorrectionBatch(rollout_logprobs=torch.tensor([-1.1, -0.4]), proximal_logprobs=proximal, advantages=torch.ones(2),
                           loss_mask=torch.tensor([True, True]), turn_ids=torch.zeros(2, dtype=torch.int16),
                           policy_versions=torch.tensor([3, 5]), cu_seqlens=torch.tensor([0, 2]), group_ids=torch.tensor([0]), version=5)


def test_losses_do_not_take_the_unknown_weights_of_a_guess_for_ones() -> None:
    batch = _batch(torch.tensor([-1.0, -0.5]))
    with pytest.raises(ConfigError, match=r"proximal\.log_linear"):
        LossInputs.of(batch, correct(batch, TIS))
