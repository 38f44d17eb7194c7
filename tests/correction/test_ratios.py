import math

import pytest
import torch

from asyncrl.correction.ratios import importance_ratio, kl_k1, kl_k2, kl_k3, masked_log_ratio
from asyncrl.errors import ShapeError

NAN, INF = float("nan"), float("inf")


def test_log_ratio_is_target_minus_sampled_and_zero_under_the_mask() -> None:
    got = masked_log_ratio(torch.tensor([-1.0, NAN, -2.0, INF]), sampled_logprobs=torch.tensor([-1.5, -1.0, -1.0, NAN]),
                           mask=torch.tensor([True, False, True, False]))
    torch.testing.assert_close(got, torch.tensor([0.5, 0.0, -1.0, 0.0]), rtol=0, atol=0)


def test_gradient_flows_through_the_target_alone_and_never_through_the_mask() -> None:
    target = torch.tensor([-1.0, NAN, -2.0], requires_grad=True)
    sampled = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    masked_log_ratio(target, sampled_logprobs=sampled, mask=torch.tensor([True, False, True])).exp().sum().backward()
    torch.testing.assert_close(target.grad, torch.tensor([1.0, 0.0, math.exp(-1.0)]))
    assert sampled.grad is None


@pytest.mark.parametrize(("given", "computed"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float32),
                                                 (torch.float64, torch.float64)])
def test_ratios_are_computed_in_float32_or_better(given: torch.dtype, computed: torch.dtype) -> None:
    logprobs = torch.tensor([-1.0, -2.0], dtype=given)
    assert masked_log_ratio(logprobs, sampled_logprobs=logprobs, mask=torch.tensor([True, True])).dtype == computed


def test_the_exponent_is_clamped_and_nan_stays_nan() -> None:
    ratio = importance_ratio(torch.tensor([1000.0, INF, -1000.0, 0.0, math.log(2.0), NAN]))
    torch.testing.assert_close(ratio[:5], torch.tensor([math.exp(20.0), math.exp(20.0), math.exp(-20.0), 1.0, 2.0]))
    assert ratio[5].isnan()


def test_estimators_have_the_signs_of_the_convention() -> None:
    """Tokens from the rollout policy, ℓ = log 2: the trainer finds them twice as likely."""
    log_ratio = torch.tensor([math.log(2.0)], dtype=torch.float64)
    assert kl_k1(log_ratio).item() == pytest.approx(-0.69314718056)
    assert kl_k2(log_ratio).item() == pytest.approx(0.24022650696)
    assert kl_k3(log_ratio).item() == pytest.approx(2.0 - 1.0 - 0.69314718056)


def test_k1_and_k3_are_unbiased_for_the_kl_from_rollout_to_trainer() -> None:
    rollout = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    trainer = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    log_ratio = (trainer / rollout).log()
    exact = (rollout * (rollout / trainer).log()).sum()
    torch.testing.assert_close((rollout * kl_k1(log_ratio)).sum(), exact)
    torch.testing.assert_close((rollout * kl_k3(log_ratio)).sum(), exact)
    assert (kl_k3(torch.linspace(-50, 50, 101)) >= 0).all()


def test_equal_logprobs_diverge_by_exactly_nothing() -> None:
    zero = torch.zeros(3)
    assert kl_k1(zero).abs().max() == 0
    assert kl_k2(zero).max() == 0
    assert kl_k3(zero).max() == 0
    assert (importance_ratio(zero) == 1).all()


def test_unequal_shapes_and_integer_masks_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"\(2,\), \(3,\)"):
        masked_log_ratio(torch.zeros(2), sampled_logprobs=torch.zeros(3), mask=torch.ones(2, dtype=torch.bool))
    with pytest.raises(ShapeError, match=r"torch.int64"):
        masked_log_ratio(torch.zeros(2), sampled_logprobs=torch.zeros(2), mask=torch.ones(2, dtype=torch.int64))


def test_k3_is_held_where_it_would_overflow_and_not_far_below() -> None:
    log_ratio = torch.tensor([-200.0, -30.0, 200.0, -math.inf], dtype=torch.float64)
    torch.testing.assert_close(kl_k3(log_ratio), torch.tensor([199.0, 29.0, math.expm1(20.0) - 20.0, math.inf], dtype=torch.float64))
