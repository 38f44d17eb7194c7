import math

import pytest
import torch
from torch import Tensor

from asyncrl.correction import LossInputs, PolicyLoss, catalog
from asyncrl.correction.catalog import (
    M2PO_MINIMUM_CLIP,
    aspo,
    cispo,
    cispo_absolute,
    dppo_kl,
    dppo_tv,
    dro,
    gepo,
    log_group_expectation,
    m2po,
    prime_rl_dppo,
    prime_rl_ipo,
    sapo,
    vespo,
)
from asyncrl.correction.losses import ppo
from asyncrl.errors import ConfigError
from tests.correction.loss_inputs import loss_inputs

DOUBLE, NAN, INF = torch.float64, float("nan"), float("inf")


def tensor(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=DOUBLE)


def at_ratios(loss, ratios: list[float], advantages: list[float], *, weights: list[float] | None = None,
              **settings: float) -> tuple[PolicyLoss, list[float]]:
    """The loss where the anchors' logprobs are 0 and the current ones log-ratios; and the gradient of its sum."""
    logprobs = tensor([math.log(ratio) for ratio in ratios]).requires_grad_()
    result = loss(logprobs, inputs=loss_inputs(tensor(advantages), weights=None if weights is None else tensor(weights)), **settings)
    result.losses.sum().backward()
    return result, logprobs.grad.tolist()


def at_probabilities(current: list[float], rollout: list[float], advantages: list[float]) -> tuple[Tensor, LossInputs]:
    inputs = loss_inputs(tensor(advantages), rollout_logprobs=tensor(rollout).log())
    return tensor(current).log().requires_grad_(), inputs


def gradient_of(result: PolicyLoss, logprobs: Tensor) -> list[float]:
    return torch.autograd.grad(result.losses.sum(), logprobs)[0].tolist()


def test_cispo_caps_the_weight_and_keeps_the_gradient_of_every_token() -> None:
    result, gradient = at_ratios(cispo, [0.5, 1.1, 2.0, 3.0], [1.0, -1.0, 2.0, -1.0], weights=[1.0, 1.0, 0.5, 1.0])
    assert gradient == pytest.approx([-0.5, 1.1, -1.28, 1.28])
    assert result.losses.tolist() == pytest.approx([-0.5 * math.log(0.5), 1.1 * math.log(1.1), -1.28 * math.log(2.0), 1.28 * math.log(3.0)])
    assert result.clipped.tolist() == [False, False, True, True]


def test_cispo_has_a_floor_only_where_one_is_given() -> None:
    result, gradient = at_ratios(cispo, [0.5, 0.9], [1.0, 1.0], clip_low=0.2)
    assert gradient == pytest.approx([-0.8, -0.9])
    assert result.clipped.tolist() == [True, False]


def test_the_absolute_cap_is_the_relative_one_and_1() -> None:
    for cap in (1.28, 5.0):
        absolute, gradient = at_ratios(cispo_absolute, [0.2, 1.3, 7.0], [1.0, 1.0, -2.0], cap=cap)
        relative, same_gradient = at_ratios(cispo, [0.2, 1.3, 7.0], [1.0, 1.0, -2.0], clip_high=cap - 1.0)
        assert gradient == pytest.approx(same_gradient)
        assert absolute.losses.tolist() == pytest.approx(relative.losses.tolist())


def test_sapo_gates_by_a_sigmoid_of_its_sign() -> None:
    result, gradient = at_ratios(sapo, [1.0, 1.0, 2.0, 2.0, 0.5], [1.0, -1.0, 1.0, -1.0, 0.0])

    def gate(ratio: float, tau: float) -> tuple[float, float]:
        share = 1.0 / (1.0 + math.exp(-tau * (ratio - 1.0)))
        return 4.0 / tau * share, 4.0 * share * (1.0 - share) * ratio

    wanted = [gate(1.0, 1.0), gate(1.0, 1.05), gate(2.0, 1.0), gate(2.0, 1.05)]
    assert result.losses.tolist() == pytest.approx([-wanted[0][0], wanted[1][0], -wanted[2][0], wanted[3][0], 0.0])
    assert gradient == pytest.approx([-wanted[0][1], wanted[1][1], -wanted[2][1], wanted[3][1], 0.0])
    assert gradient[:2] == [-1.0, 1.0]


def test_aspo_weighs_positive_tokens_by_the_inverse_ratio() -> None:
    ratios, advantages = [0.25, 0.9, 1.1, 1.5, 0.5, 5.0, 1.1, 0.5], [1, 1, 1, 1, -1, -1, -1, 0]
    result, gradient = at_ratios(aspo, ratios, advantages)
    assert gradient == pytest.approx([-3.0, -1 / 0.9, -1 / 1.1, 0.0, 0.0, 3.0, 1.1, 0.0])
    assert result.losses.tolist() == pytest.approx([-3.0, -1 / 0.9, -1 / 1.1, -1 / 1.28, 0.8, 3.0, 1.1, 0.0])
    assert result.clipped.tolist() == [False, False, False, True, True, False, False, False]


def test_aspo_has_a_cap_for_either_sign() -> None:
    assert at_ratios(aspo, [0.1, 9.0], [1.0, -1.0], cap_positive=2.0, cap_negative=4.0)[1] == pytest.approx([-2.0, 4.0])


@pytest.mark.parametrize(("loss", "settings"), [(sapo, {}), (m2po, {"tau": INF}), (prime_rl_dppo, {"kl_tau": 0.0, "low": 1.0, "high": 1.0}),
                                                (prime_rl_ipo, {"kl_tau": 0.0, "threshold": 1.0})])
def test_beyond_the_clamp_a_ratio_has_no_gradient(loss, settings: dict[str, float]) -> None:
    for far in (-25.0, 25.0):
        logprobs = tensor([far - 30.0]).requires_grad_()
        result = loss(logprobs, inputs=loss_inputs(tensor([-1.0]), rollout_logprobs=tensor([-30.0])), **settings)
        assert gradient_of(result, logprobs) == [0.0]
        assert result.losses.isfinite().all()


def test_dppo_tv_stops_a_token_that_moved_too_far_the_way_it_is_pushed() -> None:
    """Up by 0.2 under A > 0, down by 0.2 under A < 0: stopped. The other way round, or by less: not."""
    logprobs, inputs = at_probabilities([0.5, 0.1, 0.5, 0.1, 0.4, 0.41], [0.3, 0.3, 0.3, 0.3, 0.3, 0.01], [1, 1, -1, -1, 1, -2])
    result = dppo_tv(logprobs, inputs=inputs)
    assert result.clipped.tolist() == [True, False, False, True, False, False]
    assert gradient_of(result, logprobs) == pytest.approx([0.0, -1 / 3, 5 / 3, 0.0, -4 / 3, 2 * 20.0])
    wide = dppo_tv(logprobs, inputs=inputs, low=0.25, high=0.15, cap=100.0)
    assert wide.clipped.tolist() == [True, False, False, False, False, False]
    assert gradient_of(wide, logprobs)[-1] == pytest.approx(2 * 41.0)


def test_dppo_kl_is_measured_from_the_policy_that_sampled() -> None:
    logprobs, inputs = at_probabilities([0.5, 0.1, 0.5, 0.35], [0.3, 0.3, 0.3, 0.3], [1, 1, -1, 1])
    far = 0.3 * math.log(0.3 / 0.5) + 0.7 * math.log(0.7 / 0.5)
    near = 0.3 * math.log(0.3 / 0.35) + 0.7 * math.log(0.7 / 0.65)
    assert near < 0.05 < far
    assert dppo_kl(logprobs, inputs=inputs).clipped.tolist() == [True, False, False, False]
    assert dppo_kl(logprobs, inputs=inputs, limit=near * 0.99).clipped.tolist() == [True, False, False, True]
    assert dppo_kl(logprobs, inputs=inputs, limit=far * 1.01).clipped.tolist() == [False] * 4
    logprobs, inputs = at_probabilities([0.305, 0.295], [0.3, 0.3], [1.0, -1.0])
    assert dppo_kl(logprobs, inputs=inputs, limit=0.0).clipped.tolist() == [True, True]


def test_prime_rl_draws_back_the_tokens_it_stops() -> None:
    logprobs, inputs = at_probabilities([0.6, 0.6, 0.33], [0.3, 0.3, 0.3], [1.0, -1.0, 1.0])
    result = prime_rl_dppo(logprobs, inputs=inputs, kl_tau=0.01)
    square, slope = math.log(2.0) ** 2, 2.0 * math.log(2.0)
    assert result.clipped.tolist() == [True, False, False]
    assert result.losses.tolist() == pytest.approx([0.01 * square, 2.0 + 0.01 * square, -1.1 + 0.01 * math.log(1.1) ** 2])
    assert gradient_of(result, logprobs) == pytest.approx([0.01 * slope, 2.0 + 0.01 * slope, -1.1 + 0.02 * math.log(1.1)])
    ipo = prime_rl_ipo(logprobs, inputs=inputs, kl_tau=0.0)
    assert ipo.clipped.tolist() == [True, True, False]
    assert gradient_of(ipo, logprobs) == pytest.approx([0.0, 0.0, -1.1])


@pytest.mark.parametrize("loss", [prime_rl_dppo, prime_rl_ipo])
def test_prime_rl_draws_back_what_a_correction_dropped_if_it_counts(loss) -> None:
    keep, counted = torch.tensor([False, False, True]), torch.tensor([True, False, True])
    inputs = loss_inputs(tensor([NAN, NAN, 1.0]), rollout_logprobs=tensor([-1.0, NAN, -1.0]), keep_mask=keep, counted=counted)
    logprobs = tensor([-0.5, NAN, -1.0]).requires_grad_()
    result = loss(logprobs, inputs=inputs, kl_tau=0.01)
    assert result.losses.tolist() == pytest.approx([0.01 * 0.25, 0.0, -1.0])
    assert gradient_of(result, logprobs) == pytest.approx([0.01, 0.0, -1.0])
    assert result.log_ratio.tolist() == [0.0, 0.0, 0.0]


def test_m2po_clips_by_tau_in_the_logarithm() -> None:
    result, gradient = at_ratios(m2po, [1.2, 1.4, 0.8, 0.6], [1.0, 1.0, -1.0, -1.0], tau=0.25)
    assert gradient == pytest.approx([-1.2, 0.0, 0.8, 0.0])
    assert result.losses.tolist() == pytest.approx([-1.2, -math.exp(0.25), 0.8, math.exp(-0.25)])
    low, high = M2PO_MINIMUM_CLIP
    _, authors = at_ratios(m2po, [1.2, 1.4, 0.8, 0.6], [1.0, 1.0, -1.0, -1.0], tau=0.25, min_clip_low=low, min_clip_high=high)
    assert authors == pytest.approx([-1.2, -1.4, 0.8, 0.0])


def test_m2po_without_a_bound_is_the_plain_surrogate_and_with_that_of_ppo_is_ppo() -> None:
    ratios, advantages = [1e-6, 0.5, 1.0, 3.0, 1e6], [-1.0, -1.0, 1.0, 1.0, 1.0]
    result, gradient = at_ratios(m2po, ratios, advantages, tau=INF)
    assert gradient == pytest.approx([-a * r for a, r in zip(advantages, ratios, strict=True)])
    assert not result.clipped.any()
    floor, _ = at_ratios(m2po, ratios, advantages, tau=0.0, min_clip_low=0.2, min_clip_high=0.28)
    same, _ = at_ratios(ppo, ratios, advantages)
    assert torch.equal(floor.losses, same.losses)


def test_vespo_reshapes_the_product_of_a_sequence() -> None:
    """Two tokens of log-ratio 0.3 and −0.1: W = e^0.2, φ = W² e^{3 (1 − W)} for A ≥ 0, W³ e^{2 (1 − W)} else."""
    whole = math.exp(0.2)
    for advantage, wanted in ((1.0, whole**2 * math.exp(3 * (1 - whole))), (-1.0, whole**3 * math.exp(2 * (1 - whole)))):
        logprobs = tensor([0.3, -0.1, 0.0]).requires_grad_()
        result = vespo(logprobs, inputs=loss_inputs(tensor([advantage] * 3), cu_seqlens=torch.tensor([0, 2, 3])))
        assert gradient_of(result, logprobs) == pytest.approx([-advantage * wanted] * 2 + [-advantage])
        assert result.losses.tolist() == pytest.approx([-advantage * wanted * 0.3, advantage * wanted * 0.1, 0.0])


def test_vespo_is_1_on_policy_largest_at_power_over_decay_and_0_far_away() -> None:
    def kernel(log_ratio: float) -> float:
        logprobs = tensor([log_ratio]).requires_grad_()
        return -gradient_of(vespo(logprobs, inputs=loss_inputs(tensor([1.0]))), logprobs)[0]

    assert kernel(0.0) == 1.0
    peak = math.log(2.0 / 3.0)
    assert kernel(peak) > max(kernel(peak - 1e-3), kernel(peak + 1e-3))
    assert kernel(1000.0) == 0.0
    assert 0.0 < kernel(-1000.0) < 1e-14


def test_the_group_expectation_weighs_each_probability_by_itself() -> None:
    """Sequences 0, 1 and 3 are group 5, whose q are e^-1, e^-2 and e^-4; 2 is alone; 4 has no tokens and is in no group."""
    rollout = tensor([-0.5, -1.5, -2.0, NAN, -7.0, -4.0, NAN])
    got = log_group_expectation(rollout, mask=torch.tensor([1, 1, 1, 0, 1, 1, 0], dtype=torch.bool),
                                cu_seqlens=torch.tensor([0, 2, 4, 5, 6, 7]), group_ids=torch.tensor([5, 5, -3, 5, 5]))
    q = [math.exp(-1.0), math.exp(-2.0), math.exp(-4.0)]
    together = math.log(sum(x * x for x in q) / sum(q))
    assert got.tolist() == pytest.approx([together] * 3 + [0.0, -7.0, together, 0.0])


def test_the_group_expectation_survives_probabilities_that_no_float_holds() -> None:
    rollout = tensor([-5000.0, -5000.0])
    got = log_group_expectation(rollout, mask=torch.ones(2, dtype=torch.bool), cu_seqlens=torch.tensor([0, 1, 2]),
                                group_ids=torch.tensor([0, 0]))
    assert got.tolist() == pytest.approx([-5000.0, -5000.0])


def test_gepo_divides_by_the_groups_expectation_and_clips_like_ppo() -> None:
    logprobs = tensor([-1.0, -1.2, -3.0]).requires_grad_()
    inputs = loss_inputs(tensor([1.0, 1.0, -1.0]), rollout_logprobs=tensor([-9.0, -9.0, -9.0]), cu_seqlens=torch.tensor([0, 2, 3]),
                         weights=tensor([5.0, 5.0, 5.0]))
    result = gepo(logprobs, inputs=inputs, group_expectation=tensor([-1.05, -1.05, -2.9]))
    first, second = math.exp(-1.1 + 1.05), math.exp(-3.0 + 2.9)
    assert result.losses.tolist() == pytest.approx([-first, -first, second])
    assert gradient_of(result, logprobs) == pytest.approx([-first, -first, second])
    assert result.log_ratio.tolist() == pytest.approx([8.0, 7.8, 6.0])
    held = gepo(logprobs, inputs=inputs, group_expectation=tensor([-1.5, -1.5, -2.5]))
    assert held.losses.tolist() == pytest.approx([-1.2, -1.2, 0.8])
    assert held.clipped.all()


def test_gepo_on_policy_is_not_1_but_for_equal_sequences() -> None:
    logprobs, offsets = tensor([-1.0, -2.0]), torch.tensor([0, 1, 2])
    inputs = loss_inputs(tensor([-1.0, -1.0]), rollout_logprobs=logprobs, cu_seqlens=offsets)
    q = [math.exp(-1.0), math.exp(-2.0)]
    expected = (q[0] ** 2 + q[1] ** 2) / sum(q)
    for rollout, wanted in ((logprobs, [q[0] / expected, q[1] / expected]), (tensor([-1.5, -1.5]), [math.exp(0.5), math.exp(-0.5)])):
        expectation = log_group_expectation(rollout, mask=inputs.keep_mask, cu_seqlens=offsets, group_ids=torch.tensor([0, 0]))
        ratios = gepo(logprobs, inputs=inputs, group_expectation=expectation, clip_low=1.0, clip_high=9.0).losses
        assert ratios.tolist() == pytest.approx(wanted)


def test_dro_adds_a_square_to_the_score() -> None:
    logprobs = tensor([-1.0, -2.0]).requires_grad_()
    inputs = loss_inputs(tensor([0.5, -1.0]), rollout_logprobs=tensor([-1.4, -2.0]), weights=tensor([9.0, 9.0]))
    result = dro(logprobs, inputs=inputs, beta=0.1)
    assert result.losses.tolist() == pytest.approx([0.5 + 0.05 * 0.16, -2.0])
    assert gradient_of(result, logprobs) == pytest.approx([-0.5 + 0.1 * 0.4, 1.0])


@pytest.mark.parametrize(("loss", "setting", "bad"), [
    ("cispo", "clip_high", -0.1), ("cispo", "clip_low", 1.5), ("cispo_absolute", "cap", 1.0), ("cispo_absolute", "cap", INF),
    ("sapo", "temperature_positive", 0.0), ("sapo", "temperature_negative", NAN), ("aspo", "clip_low", -0.1), ("aspo", "cap_positive", 1.0),
    ("aspo", "cap_negative", INF), ("dppo_tv", "low", -0.1), ("dppo_tv", "high", NAN), ("dppo_tv", "cap", 1.0), ("dppo_kl", "limit", -1.0),
    ("dppo_kl", "cap", 0.5), ("prime_rl_dppo", "low", -1.0), ("prime_rl_dppo", "high", INF), ("prime_rl_dppo", "kl_tau", -1e-3),
    ("prime_rl_ipo", "threshold", -0.1), ("prime_rl_ipo", "kl_tau", NAN), ("m2po", "tau", -0.1), ("m2po", "tau", NAN),
    ("m2po", "min_clip_low", 2.0), ("m2po", "min_clip_high", -1.0), ("vespo", "power_positive", 0.0), ("vespo", "decay_negative", -1.0),
    ("gepo", "clip_high", -0.1), ("dro", "beta", -0.1)])
def test_settings_outside_their_range_are_refused(loss: str, setting: str, bad: float) -> None:
    needed = {"m2po": {"tau": 0.1}, "gepo": {"group_expectation": torch.zeros(2)}}.get(loss, {})
    with pytest.raises(ConfigError, match=rf"loss\.{setting}\b"):
        getattr(catalog, loss)(torch.zeros(2), inputs=loss_inputs(torch.zeros(2)), **needed | {setting: bad})
