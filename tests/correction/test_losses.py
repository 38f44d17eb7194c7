import math

import pytest
import torch
from torch import Tensor

from asyncrl.correction import PolicyLoss
from asyncrl.correction.losses import decoupled_ppo, entropy_bonus, importance_sampling, ppo, reinforce
from asyncrl.errors import ConfigError, ShapeError
from tests.correction.loss_inputs import loss_inputs

NAN, INF = float("nan"), float("inf")


def loss_of(log_ratio: list[float], *, advantages: list[float], keep: list[bool] | None = None, weights: list[float] | None = None,
            dtype: torch.dtype = torch.float32, **settings: float) -> tuple[PolicyLoss, Tensor]:
    """Decoupled PPO at the given current − proximal log-ratios; the second result is the gradient of the sum."""
    logprobs = torch.tensor(log_ratio, dtype=dtype, requires_grad=True)
    inputs = loss_inputs(torch.tensor(advantages, dtype=dtype), keep_mask=None if keep is None else torch.tensor(keep),
                         weights=None if weights is None else torch.tensor(weights, dtype=dtype))
    result = decoupled_ppo(logprobs, inputs=inputs, **settings)
    result.losses.sum().backward()
    return result, logprobs.grad


def close(got: Tensor, wanted: list[float]) -> None:
    torch.testing.assert_close(got.detach(), torch.tensor(wanted, dtype=got.dtype), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_masked_overflow_reaches_neither_loss_nor_gradient(dtype: torch.dtype) -> None:
    result, grad = loss_of([1000.0, 0.0], advantages=[1.0, 1.0], keep=[False, True], dtype=dtype)
    assert result.losses.sum().item() == -1.0
    assert grad.tolist() == [0.0, -1.0]


@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 1e30])
def test_garbage_under_the_mask_reaches_neither_loss_nor_gradient(garbage: float) -> None:
    result, grad = loss_of([garbage, 0.0], advantages=[garbage, 1.0], keep=[False, True], weights=[garbage, 1.0])
    assert result.losses.tolist() == [0.0, -1.0]
    assert grad.tolist() == [0.0, -1.0]
    assert result.log_ratio.tolist() == [0.0, 0.0]
    assert result.clipped.tolist() == [False, False]


def test_clip_higher_clips_at_one_point_two_eight_above_and_at_zero_point_eight_below() -> None:
    ratios = [0.5, 0.9, 1.1, 1.5, 5.0, 5.0, 0.5]
    result, grad = loss_of([math.log(r) for r in ratios], advantages=[-1, -1, 1, 1, -1, 1, 1], dtype=torch.float64)
    close(result.losses, [0.8, 0.9, -1.1, -1.28, 5.0, -1.28, -0.5])
    close(grad, [0.0, 0.9, -1.1, 0.0, 5.0, 0.0, -0.5])
    assert result.clipped.tolist() == [True, False, False, True, False, True, False]


def test_the_weight_multiplies_after_clipping() -> None:
    result, grad = loss_of([math.log(1.5), math.log(1.1)], advantages=[1.0, 1.0], weights=[2.0, 0.5], dtype=torch.float64)
    close(result.losses, [-2.56, -0.55])
    close(grad, [0.0, -0.55])


def test_weights_advantages_and_proximal_logprobs_carry_no_gradient() -> None:
    logprobs, proximal, advantages, weights = (torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True) for _ in range(4))
    used = weights.exp()
    result = decoupled_ppo(logprobs, inputs=loss_inputs(advantages, proximal_logprobs=proximal, weights=used))
    result.losses.sum().backward()
    assert weights.grad is None
    assert advantages.grad is None
    assert proximal.grad is None
    torch.testing.assert_close(logprobs.grad, -(used * advantages).detach())


def test_the_first_update_is_reinforce_with_the_weight() -> None:
    """current = proximal: ratio exactly 1, nothing clipped, gradient −w·A."""
    result, grad = loss_of([0.0, 0.0, 0.0], advantages=[1.5, -2.0, 0.0], weights=[2.0, 0.5, 1.0])
    assert grad.tolist() == [-3.0, 1.0, 0.0]
    assert result.losses.tolist() == [-3.0, 1.0, 0.0]
    assert not result.clipped.any()
    assert result.log_ratio.tolist() == [0.0, 0.0, 0.0]


def test_halved_ratios_under_negative_advantages_are_all_clipped() -> None:
    result, grad = loss_of([-math.log(2.0)] * 3, advantages=[-1.0] * 3)
    assert result.clipped.all()
    assert grad.tolist() == [0.0] * 3


def test_beyond_the_clamp_the_loss_is_finite_and_pushes_nothing() -> None:
    result, grad = loss_of([1000.0, -1000.0, 88.8], advantages=[-1.0, 1.0, 0.0])
    close(result.losses, [math.exp(20.0), -math.exp(-20.0), 0.0])
    assert grad.tolist() == [0.0, 0.0, 0.0]
    assert result.log_ratio.tolist()[0] == 1000.0


def test_an_all_masked_microbatch_gives_zero_loss_and_zero_gradient() -> None:
    result, grad = loss_of([NAN, INF], advantages=[NAN, NAN], keep=[False, False])
    assert result.losses.sum().item() == 0.0
    assert grad.tolist() == [0.0, 0.0]


def test_nan_at_a_kept_token_reaches_the_loss() -> None:
    for case in ({"log_ratio": [NAN], "advantages": [1.0]}, {"log_ratio": [0.0], "advantages": [NAN]},
                 {"log_ratio": [0.0], "advantages": [1.0], "weights": [NAN]}):
        assert loss_of(**case)[0].losses.isnan().all()


def test_the_gradient_is_that_of_the_formula() -> None:
    proximal = torch.tensor([-1.0, -0.5, -2.0, -0.3, -1.2], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, 0.7, -0.2, 3.0], dtype=torch.float64)
    inputs = loss_inputs(advantages, proximal_logprobs=proximal, weights=torch.tensor([0.5, 2.0, 1.0, 1.3, 9.0], dtype=torch.float64),
                         keep_mask=torch.tensor([True, True, True, True, False]))
    logprobs = (proximal + torch.tensor([0.05, -0.4, 0.5, 0.1, 0.0], dtype=torch.float64)).requires_grad_()
    for loss in (decoupled_ppo, ppo, reinforce, importance_sampling):
        assert torch.autograd.gradcheck(lambda x, loss=loss: loss(x, inputs=inputs).losses, logprobs)
    assert torch.autograd.gradcheck(lambda x: decoupled_ppo(x, inputs=inputs, dual_clip=3.0).losses, logprobs)


def test_ppo_is_decoupled_ppo_with_one_anchor_and_weight_one() -> None:
    generator = torch.Generator().manual_seed(1)
    rollout, current, advantages = (torch.randn(20, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.arange(20) % 3 > 0
    one = ppo(current, inputs=loss_inputs(advantages, rollout_logprobs=rollout, keep_mask=mask))
    ratio = (current - rollout).exp()
    torch.testing.assert_close(one.losses, torch.where(mask, -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages), 0.0))


def test_bfloat16_logprobs_are_computed_in_float32() -> None:
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.bfloat16, requires_grad=True)
    result = ppo(logprobs, inputs=loss_inputs(torch.ones(2), rollout_logprobs=torch.tensor([-1.001, -2.0])))
    assert result.losses.dtype == torch.float32
    close(result.losses, [-math.exp(0.001), -1.0])


def test_clip_ranges_without_one_and_unequal_shapes_are_refused() -> None:
    arguments = {"inputs": loss_inputs(torch.zeros(2))}
    for clip in ({"clip_low": -0.1}, {"clip_low": 1.5}, {"clip_high": -0.1}, {"clip_high": NAN}):
        with pytest.raises(ConfigError, match=r"loss\.clip_low, loss\.clip_high"):
            ppo(torch.zeros(2), **arguments, **clip)
    with pytest.raises(ShapeError):
        ppo(torch.zeros(3), **arguments)


def test_importance_weights_make_the_stale_gradient_exact() -> None:
    """Sample from v0, train at v1, enumerate the vocabulary: E[w · A · score] is the policy gradient at v1."""
    logits = torch.tensor([0.3, -0.2, 0.9, 0.1], dtype=torch.float64, requires_grad=True)
    rollout = torch.tensor([1.0, 0.2, -0.5, 0.4], dtype=torch.float64).log_softmax(0)
    rewards = torch.tensor([1.0, 0.0, 2.0, -1.0], dtype=torch.float64)
    (exact,) = torch.autograd.grad((logits.softmax(0) * rewards).sum(), logits)
    current = logits.log_softmax(0)
    weights = (current.detach() - rollout).exp()
    inputs = loss_inputs(rewards, proximal_logprobs=current.detach(), rollout_logprobs=rollout, weights=weights)
    for loss in (decoupled_ppo, reinforce, importance_sampling):
        (got,) = torch.autograd.grad((rollout.exp() * loss(current, inputs=inputs).losses).sum(), logits, retain_graph=True)
        torch.testing.assert_close(-got, exact, rtol=0, atol=1e-12)


def test_a_dual_clip_bounds_the_loss_of_negative_advantages_alone() -> None:
    ratios = [0.5, 0.9, 1.1, 1.5, 5.0, 5.0, 0.5]
    result, grad = loss_of([math.log(r) for r in ratios], advantages=[-1, -1, 1, 1, -1, 1, 1], dtype=torch.float64, dual_clip=3.0)
    close(result.losses, [0.8, 0.9, -1.1, -1.28, 3.0, -1.28, -0.5])
    close(grad, [0.0, 0.9, -1.1, 0.0, 0.0, 0.0, -0.5])


@pytest.mark.parametrize("dual_clip", [0.5, 1.0, 1.28, NAN, INF])
def test_a_dual_clip_inside_the_clip_range_is_refused(dual_clip: float) -> None:
    with pytest.raises(ConfigError, match=r"loss\.dual_clip"):
        decoupled_ppo(torch.zeros(2), inputs=loss_inputs(torch.zeros(2)), dual_clip=dual_clip)


def test_reinforce_weighs_the_score_and_importance_sampling_the_gain() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64, requires_grad=True)
    inputs = loss_inputs(torch.tensor([1.0, -0.5, NAN], dtype=torch.float64), keep_mask=torch.tensor([True, True, False]),
                         weights=torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64),
                         rollout_logprobs=torch.tensor([-1.0, -2.0 - math.log(2.0), NAN], dtype=torch.float64))
    result = reinforce(logprobs, inputs=inputs)
    close(result.losses, [2.0, -1.0, 0.0])
    result.losses.sum().backward()
    close(logprobs.grad, [-2.0, 0.5, 0.0])
    logprobs.grad = None
    result = importance_sampling(logprobs, inputs=inputs)
    close(result.losses, [-1.0, 1.0, 0.0])
    result.losses.sum().backward()
    close(logprobs.grad, [-1.0, 1.0, 0.0])


def test_the_entropy_bonus_raises_the_entropy_of_kept_tokens() -> None:
    entropy = torch.tensor([0.5, NAN], requires_grad=True)
    bonus = entropy_bonus(entropy, keep_mask=torch.tensor([True, False]), coefficient=0.1)
    close(bonus, [-0.05, 0.0])
    bonus.sum().backward()
    close(entropy.grad, [-0.1, 0.0])


@pytest.mark.parametrize(("entropy", "mask", "coefficient"), [([3.0, 1.0], [True], 0.1), ([3.0], [True], NAN), ([3.0], [True], -0.1)])
def test_an_entropy_bonus_of_other_shapes_or_signs_is_refused(entropy: list[float], mask: list[bool], coefficient: float) -> None:
    with pytest.raises((ShapeError, ConfigError)):
        entropy_bonus(torch.tensor(entropy), keep_mask=torch.tensor(mask), coefficient=coefficient)
