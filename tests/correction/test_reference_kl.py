"""What each term pulls to, found by enumerating a vocabulary of five tokens and three policies over it."""

import math

import pytest
import torch
from torch import Tensor

from asyncrl.correction import LossInputs
from asyncrl.correction.advantages import no_signal
from asyncrl.correction.losses import reinforce
from asyncrl.correction.reference_kl import Estimator, penalty, reference_kl
from asyncrl.errors import ConfigError, ShapeError
from tests.correction.loss_inputs import loss_inputs

DOUBLE, NAN, INF = torch.float64, float("nan"), float("inf")
REFERENCE = torch.tensor([0.4, -0.3, 0.8, 0.0, -1.0], dtype=DOUBLE).log_softmax(0)
ELSEWHERE = torch.tensor([-0.5, 0.9, 0.1, 0.3, 0.2], dtype=DOUBLE).log_softmax(0)


def logits() -> Tensor:
    return torch.tensor([1.0, 0.2, -0.6, 0.5, -0.1], dtype=DOUBLE, requires_grad=True)


def exact_gradient(*, forward: bool) -> Tensor:
    leaf = logits()
    current = leaf.log_softmax(0)
    first, second = (REFERENCE, current) if forward else (current, REFERENCE)
    return torch.autograd.grad((first.exp() * (first - second)).sum(), leaf)[0]


def expected(estimator: Estimator, sampled: str) -> tuple[float, Tensor]:
    """Mean value and mean gradient of a term over the tokens that the current policy, or another one, samples."""
    leaf = logits()
    current = leaf.log_softmax(0)
    rollout = current.detach() if sampled == "current" else ELSEWHERE
    term = reference_kl(current, ref_logprobs=REFERENCE, inputs=loss_inputs(torch.zeros(5, dtype=DOUBLE), rollout_logprobs=rollout),
                        coefficient=1.0, estimator=estimator)
    loss = (rollout.exp() * term).sum()
    return loss.item(), torch.autograd.grad(loss, leaf)[0]


@pytest.mark.parametrize(("estimator", "sampled", "forward"), [
    ("k3_importance", "current", False), ("k3_importance", "elsewhere", False), ("k2", "current", False), ("k3_forward", "current", True)])
def test_the_mean_gradient_is_that_of_the_divergence_the_table_names(estimator: Estimator, sampled: str, forward: bool) -> None:
    torch.testing.assert_close(expected(estimator, sampled)[1], exact_gradient(forward=forward), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("estimator", "sampled"), [("k2", "elsewhere"), ("k3_forward", "elsewhere"), ("k3_forward", "current")])
def test_and_nowhere_else_is_it_that_of_the_reverse_kl(estimator: Estimator, sampled: str) -> None:
    assert (expected(estimator, sampled)[1] - exact_gradient(forward=False)).abs().max() > 1e-2


def test_k1_in_a_loss_has_no_mean_gradient_which_is_why_it_is_refused() -> None:
    leaf = logits()
    current = leaf.log_softmax(0)
    (gradient,) = torch.autograd.grad((current.detach().exp() * (current - REFERENCE)).sum(), leaf)
    torch.testing.assert_close(gradient, torch.zeros(5, dtype=DOUBLE), rtol=0, atol=1e-12)


def test_the_values_of_k3_are_estimates_of_the_reverse_kl() -> None:
    current = logits().detach().log_softmax(0)
    exact = (current.exp() * (current - REFERENCE)).sum().item()
    for estimator, sampled in (("k3_importance", "current"), ("k3_importance", "elsewhere"), ("k3_forward", "current")):
        assert expected(estimator, sampled)[0] == pytest.approx(exact)


@pytest.mark.parametrize("sampled", ["current", "elsewhere"])
def test_k1_in_the_reward_pulls_by_the_reverse_kl(sampled: str) -> None:
    """As the advantage of a policy gradient, weighed where another policy sampled."""
    leaf = logits()
    current = leaf.log_softmax(0)
    rollout = current.detach() if sampled == "current" else ELSEWHERE
    rewards = penalty(current, ref_logprobs=REFERENCE, mask=torch.ones(5, dtype=torch.bool), coefficient=0.3)
    assert not rewards.requires_grad
    inputs = loss_inputs(rewards, proximal_logprobs=current.detach(), rollout_logprobs=rollout, weights=(current.detach() - rollout).exp())
    (gradient,) = torch.autograd.grad((rollout.exp() * reinforce(current, inputs=inputs).losses).sum(), leaf)
    torch.testing.assert_close(gradient, 0.3 * exact_gradient(forward=False), rtol=0, atol=1e-12)


def of_tokens(logprobs: list[float], reference: list[float], rollout: list[float], *, keep: list[bool] | None = None,
              dtype: torch.dtype = DOUBLE, **settings: object) -> tuple[Tensor, list[float]]:
    leaf = torch.tensor(logprobs, dtype=dtype, requires_grad=True)
    inputs: LossInputs = loss_inputs(torch.zeros(len(leaf), dtype=dtype), rollout_logprobs=torch.tensor(rollout, dtype=dtype),
                                     keep_mask=None if keep is None else torch.tensor(keep))
    term = reference_kl(leaf, ref_logprobs=torch.tensor(reference, dtype=dtype), inputs=inputs, **{"coefficient": 1.0} | settings)
    term.sum().backward()
    return term.detach(), leaf.grad.tolist()


def test_terms_of_single_tokens() -> None:
    tokens = ([-1.0, -0.5, -2.0], [-1.2, -0.1, -2.0], [-1.1, -0.9, -1.5])
    ratio, k3 = [math.exp(0.1), math.exp(0.4)], [math.exp(-0.2) - 0.8, math.exp(0.4) - 1.4]
    for estimator, values, gradients in (
            ("k2", [0.02, 0.08, 0.0], [0.2, -0.4, 0.0]),
            ("k3_forward", [*k3, 0.0], [1 - math.exp(-0.2), 1 - math.exp(0.4), 0.0]),
            ("k3_importance", [ratio[0] * k3[0], ratio[1] * k3[1], 0.0], [ratio[0] * 0.2, ratio[1] * -0.4, 0.0])):
        term, gradient = of_tokens(*tokens, estimator=estimator, coefficient=0.1)
        assert term.tolist() == pytest.approx([0.1 * value for value in values])
        assert gradient == pytest.approx([0.1 * slope for slope in gradients])


@pytest.mark.parametrize("estimator", ["k3_importance", "k2", "k3_forward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_reference_equal_to_the_policy_gives_exactly_nothing(estimator: Estimator, dtype: torch.dtype) -> None:
    logprobs = [-0.1, -3.7, -12.0]
    term, gradient = of_tokens(logprobs, logprobs, [-0.3, -3.0, -12.5], estimator=estimator, dtype=dtype)
    assert term.tolist() == gradient == [0.0, 0.0, 0.0]
    assert term.dtype == torch.float32


@pytest.mark.parametrize("estimator", ["k3_importance", "k2", "k3_forward"])
@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 1e30])
def test_garbage_at_dropped_tokens_reaches_nothing(estimator: Estimator, garbage: float) -> None:
    clean, gradient = of_tokens([-1.0], [-1.2], [-1.1], estimator=estimator)
    term, dirty = of_tokens([garbage, -1.0], [garbage, -1.2], [garbage, -1.1], keep=[False, True], estimator=estimator)
    assert term.tolist() == [0.0, *clean.tolist()]
    assert dirty == [0.0, *gradient]


@pytest.mark.parametrize("estimator", ["k3_importance", "k2", "k3_forward"])
def test_a_kept_nan_is_seen_and_a_long_way_overflows_nothing(estimator: Estimator) -> None:
    assert of_tokens([NAN], [-1.0], [-1.0], estimator=estimator)[0].isnan().all()
    assert of_tokens([-1.0], [NAN], [-1.0], estimator=estimator)[0].isnan().all()
    term, gradient = of_tokens([-1.0, -1.0, -1000.0, -1.0], [-1000.0, -1.0, -1.0, -1.0], [-1.0, -1000.0, -1.0, -1.0],
                               estimator=estimator, dtype=torch.float32)
    assert term.isfinite().all()
    assert all(map(math.isfinite, gradient))


@pytest.mark.parametrize("estimator", ["k3_importance", "k2", "k3_forward"])
def test_the_gradient_of_a_token_is_that_of_its_value(estimator: Estimator) -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs, reference, rollout = (-2.0 * torch.rand(7, generator=generator, dtype=DOUBLE) for _ in range(3))
    inputs = loss_inputs(torch.zeros(7, dtype=DOUBLE), rollout_logprobs=rollout, keep_mask=torch.arange(7) != 2)
    assert torch.autograd.gradcheck(lambda x: reference_kl(x, ref_logprobs=reference, inputs=inputs, coefficient=0.7, estimator=estimator),
                                    logprobs.requires_grad_())


def test_groups_without_signal_are_pulled_unless_they_are_excluded() -> None:
    """Two groups of two rollouts of one token; the first has equal rewards, so no advantage anywhere."""
    exclude = torch.from_numpy(no_signal([1.0, 1.0, 0.0, 1.0], group_ids=[7, 7, 9, 9]))
    assert exclude.tolist() == [True, True, False, False]
    tokens = ([-1.0, -0.5, -1.0, -0.5], [-1.2, -0.1, -1.2, -0.1], [-1.0, -0.5, -1.0, -0.5])
    _, pulled = of_tokens(*tokens)
    term, spared = of_tokens(*tokens, exclude=exclude)
    assert pulled == pytest.approx([0.2, -0.4] * 2)
    assert spared == pytest.approx([0.0, 0.0, 0.2, -0.4])
    assert term[:2].tolist() == [0.0, 0.0]


def test_what_pulls_nowhere_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="mean 0"):
        of_tokens([-1.0], [-1.0], [-1.0], estimator="k1")
    with pytest.raises(ConfigError, match="k3_forward"):
        of_tokens([-1.0], [-1.0], [-1.0], estimator="k3")
    with pytest.raises(ConfigError, match="one of k3_importance, k2, k3_forward"):
        of_tokens([-1.0], [-1.0], [-1.0], estimator="abs")
    for coefficient in (-0.1, NAN, INF):
        with pytest.raises(ConfigError, match=r"coefficient"):
            of_tokens([-1.0], [-1.0], [-1.0], coefficient=coefficient)
        with pytest.raises(ConfigError, match=r"coefficient"):
            penalty(torch.zeros(1), ref_logprobs=torch.zeros(1), mask=torch.ones(1, dtype=torch.bool), coefficient=coefficient)


def test_shapes_that_disagree_are_refused() -> None:
    inputs = loss_inputs(torch.zeros(2))
    with pytest.raises(ShapeError):
        reference_kl(torch.zeros(3), ref_logprobs=torch.zeros(3), inputs=inputs, coefficient=1.0)
    with pytest.raises(ShapeError):
        reference_kl(torch.zeros(2), ref_logprobs=torch.zeros(3), inputs=inputs, coefficient=1.0)
    for exclude in (torch.zeros(3, dtype=torch.bool), torch.zeros(2)):
        with pytest.raises(ShapeError, match="exclude"):
            reference_kl(torch.zeros(2), ref_logprobs=torch.zeros(2), inputs=inputs, coefficient=1.0, exclude=exclude)


def test_a_ratio_beyond_the_clamp_pulls_nothing() -> None:
    assert of_tokens([-1.0], [-2.0], [-30.0])[1] == [0.0]


def test_the_penalty_is_0_where_the_mask_is_off() -> None:
    got = penalty(torch.tensor([-1.0, NAN]), ref_logprobs=torch.tensor([-1.5, INF]), mask=torch.tensor([True, False]), coefficient=0.1)
    assert got.tolist() == pytest.approx([-0.05, 0.0])


def test_neither_order_nor_split_changes_a_token() -> None:
    generator = torch.Generator().manual_seed(1)
    logprobs, reference, rollout = (-2.0 * torch.rand(6, generator=generator, dtype=DOUBLE) for _ in range(3))
    inputs = loss_inputs(torch.zeros(6, dtype=DOUBLE), rollout_logprobs=rollout)
    whole = reference_kl(logprobs, ref_logprobs=reference, inputs=inputs, coefficient=1.0)
    part = torch.tensor([4, 1, 5])
    share = loss_inputs(torch.zeros(3, dtype=DOUBLE), rollout_logprobs=rollout[part])
    assert torch.equal(reference_kl(logprobs[part], ref_logprobs=reference[part], inputs=share, coefficient=1.0), whole[part])


def test_the_forward_kl_goes_on_pulling_where_nothing_overflows() -> None:
    logprobs = torch.tensor([-1.0, -1.0], dtype=torch.float64, requires_grad=True)
    losses = reference_kl(logprobs, ref_logprobs=torch.tensor([-22.0, -101.0], dtype=torch.float64),
                          inputs=loss_inputs(torch.ones(2, dtype=torch.float64)), coefficient=1.0, estimator="k3_forward")
    losses.sum().backward()
    torch.testing.assert_close(losses.detach(), torch.tensor([20.0, 99.0], dtype=torch.float64))
    torch.testing.assert_close(logprobs.grad, torch.ones(2, dtype=torch.float64))
