import math

import pytest
import torch
from torch import Tensor

from asyncrl.correction import LossInputs, PolicyLoss
from asyncrl.correction.aggregate import aggregate, count
from asyncrl.correction.sequence_losses import gmpo, gspo, gspo_token
from asyncrl.errors import ConfigError
from tests.correction.loss_inputs import loss_inputs

DOUBLE = torch.float64
OFFSETS = torch.tensor([0, 4, 7, 9])
LOG_RATIO = torch.tensor([0.1, 0.3, -0.05, -0.4, 0.25, -0.35, 0.0, 0.15, -0.6], dtype=DOUBLE)
ADVANTAGES = torch.tensor([1.2] * 4 + [-0.7] * 3 + [0.4] * 2, dtype=DOUBLE)
CLIP = {"clip_low": 0.02, "clip_high": 0.02}


def batch_of(*, advantages: Tensor = ADVANTAGES, keep: list[int] | None = None, weights: Tensor | None = None) -> LossInputs:
    """Three sequences of 4, 3 and 2 tokens whose proximal logprobs are 0: the current ones are log-ratios."""
    everything = torch.ones(9, dtype=torch.bool)
    return loss_inputs(advantages, keep_mask=everything if keep is None else torch.tensor(keep, dtype=torch.bool), counted=everything,
                       weights=weights, cu_seqlens=OFFSETS)


def mean_over_sequences(result: PolicyLoss, logprobs: Tensor, inputs: LossInputs) -> tuple[float, list[float]]:
    """The papers' objective and its gradient."""
    loss = aggregate(result.losses, loss_mask=inputs.counted, cu_seqlens=inputs.cu_seqlens, mode="seq_mean_token_mean",
                     denominators=count(inputs.counted, cu_seqlens=inputs.cu_seqlens))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.item(), gradient.tolist()


@pytest.mark.parametrize("loss", [gspo, gspo_token])
def test_gspo_clips_the_geometric_mean_of_a_sequence(loss) -> None:
    logprobs, inputs = LOG_RATIO.clone().requires_grad_(), batch_of()
    result = loss(logprobs, inputs=inputs, **CLIP)
    ratios = [math.exp(-0.0125), math.exp(-0.1 / 3), math.exp(-0.225)]
    per_sequence = [-1.2 * ratios[0], 0.7 * 0.98, -0.4 * ratios[2]]
    torch.testing.assert_close(result.losses.detach(), torch.tensor(per_sequence, dtype=DOUBLE).repeat_interleave(OFFSETS.diff()))
    assert result.clipped.tolist() == [False] * 4 + [True] * 3 + [False] * 2
    value, gradient = mean_over_sequences(result, logprobs, inputs)
    assert value == pytest.approx(sum(per_sequence) / 3)
    assert gradient == pytest.approx([-1.2 * ratios[0] / 4 / 3] * 4 + [0.0] * 3 + [-0.4 * ratios[2] / 2 / 3] * 2)


def test_gmpo_clips_each_token_on_the_side_it_is_pushed_to() -> None:
    """A > 0: 0.3 counts as 0.2, −0.4 as it is. A < 0: −0.35 counts as −0.2, 0.25 as it is."""
    logprobs, inputs = LOG_RATIO.clone().requires_grad_(), batch_of()
    result = gmpo(logprobs, inputs=inputs, log_clip_low=0.2, log_clip_high=0.2)
    ratios = [math.exp((0.1 + 0.2 - 0.05 - 0.4) / 4), math.exp((0.25 - 0.2) / 3), math.exp(-0.225)]
    assert result.clipped.tolist() == [False, True, False, False, False, True, False, False, False]
    value, gradient = mean_over_sequences(result, logprobs, inputs)
    assert value == pytest.approx(sum(-a * r for a, r in zip([1.2, -0.7, 0.4], ratios, strict=True)) / 3)
    pulls = [-a * r / n / 3 for a, r, n in zip([1.2, -0.7, 0.4], ratios, [4, 3, 2], strict=True)]
    assert gradient == pytest.approx([pulls[0], 0.0, pulls[0], pulls[0], pulls[1], 0.0, pulls[1], pulls[2], pulls[2]])


@pytest.mark.parametrize("loss", [gspo, gspo_token, gmpo])
def test_a_dropped_token_leaves_the_mean_and_stays_in_the_denominator(loss) -> None:
    """Of four tokens two are kept: their mean is the ratio, and the sequence pulls with half its weight."""
    logprobs, inputs = LOG_RATIO.clone().requires_grad_(), batch_of(keep=[1, 0, 1, 0, 1, 1, 1, 1, 1])
    result = loss(logprobs, inputs=inputs)
    ratio = math.exp((0.1 - 0.05) / 2)
    held = loss is not gmpo  # 1.025 is beyond GSPO's clip
    assert result.losses[:4].tolist() == pytest.approx([-1.2 * (1.0004 if held else ratio), 0.0] * 2)
    _, gradient = mean_over_sequences(result, logprobs, inputs)
    assert gradient[:4] == pytest.approx([0.0 if held else -1.2 * ratio / 4 / 3, 0.0] * 2)


@pytest.mark.parametrize("keep", [None, [1, 0, 1, 1, 1, 1, 0, 0, 1]])
@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_the_token_form_is_gspo_where_a_sequence_has_one_advantage(keep: list[int] | None, weight: float) -> None:
    inputs = batch_of(keep=keep, weights=torch.full((9,), weight, dtype=DOUBLE))
    answers = []
    for loss in (gspo, gspo_token):
        logprobs = LOG_RATIO.clone().requires_grad_()
        answers.append(mean_over_sequences(loss(logprobs, inputs=inputs, clip_low=0.2, clip_high=0.3), logprobs, inputs))
    assert answers[0][0] == pytest.approx(answers[1][0])
    assert answers[0][1] == pytest.approx(answers[1][1])


def test_in_the_token_form_an_advantage_pushes_its_own_token() -> None:
    advantages = torch.tensor([1.0, 0.0, 2.0, -1.0] + [0.0] * 5, dtype=DOUBLE)
    ratio = math.exp(-0.0125)
    for loss, wanted in ((gspo_token, [-1.0, 0.0, -2.0, 1.0]), (gspo, [-0.5] * 4)):
        logprobs = LOG_RATIO.clone().requires_grad_()
        loss(logprobs, inputs=batch_of(advantages=advantages), clip_low=0.2, clip_high=0.2).losses.sum().backward()
        assert logprobs.grad.tolist() == pytest.approx([ratio * pull for pull in wanted] + [0.0] * 5)


@pytest.mark.parametrize("loss", [gspo, gspo_token, gmpo])
def test_a_sequence_is_weighed_by_the_mean_of_its_weights(loss) -> None:
    weights = torch.tensor([2.0, 0.0, 1.0, 3.0, 1.0, 1.0, 1.0, 0.5, 0.5], dtype=DOUBLE)
    logprobs = LOG_RATIO.clone().requires_grad_()
    plain = loss(logprobs, inputs=batch_of()).losses
    weighed = loss(logprobs, inputs=batch_of(weights=weights)).losses
    torch.testing.assert_close(weighed.detach(), plain.detach() * weights)
    assert weighed[:4].mean().item() == pytest.approx(1.5 * plain[:4].mean().item())


def test_a_mean_beyond_the_clamp_pushes_nothing() -> None:
    inputs = loss_inputs(torch.full((2,), -1.0), cu_seqlens=torch.tensor([0, 2]))
    for loss in (gspo, gspo_token, gmpo):
        logprobs = torch.tensor([1000.0, 50.0], requires_grad=True)
        result = loss(logprobs, inputs=inputs)
        result.losses.sum().backward()
        torch.testing.assert_close(result.losses.detach(), torch.full((2,), math.exp(20.0)))
        assert logprobs.grad.tolist() == [0.0, 0.0]
        assert result.log_ratio.tolist() == [1000.0, 50.0]


def test_settings_outside_their_range_are_refused() -> None:
    logprobs, inputs = torch.zeros(2), loss_inputs(torch.zeros(2))
    for loss in (gspo, gspo_token):
        for clip in ({"clip_low": -0.1}, {"clip_low": 1.1}, {"clip_high": -1.0}, {"clip_high": float("nan")}):
            with pytest.raises(ConfigError, match=r"loss\.clip_low, loss\.clip_high"):
                loss(logprobs, inputs=inputs, **clip)
    for clip in ({"log_clip_low": -0.1}, {"log_clip_high": float("inf")}, {"log_clip_low": float("nan")}):
        with pytest.raises(ConfigError, match=r"loss\.log_clip_low, loss\.log_clip_high"):
            gmpo(logprobs, inputs=inputs, **clip)


@pytest.mark.parametrize("loss", [gspo, gmpo])
@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_a_broken_logprob_gives_no_finite_gradient(loss, value) -> None:
    logprobs = torch.tensor([value, -1.0, -2.0], requires_grad=True)
    loss(logprobs, inputs=loss_inputs(torch.ones(3), rollout_logprobs=torch.full((3,), -1.0))).losses.sum().backward()
    assert logprobs.grad[0].isnan()
