import math
from collections.abc import Callable

import pytest
import torch

from asyncrl.correction import Correction, CorrectionBatch, correct, preset, weigh

Make = Callable[..., CorrectionBatch]



def close(got: torch.Tensor, wanted: list[float]) -> None:
    torch.testing.assert_close(got, torch.tensor(wanted, dtype=got.dtype), rtol=1e-6, atol=1e-7)


def test_token_tis_caps_the_weight_and_keeps_every_loss_token(packed: Make) -> None:
    batch = packed()  # log-ratios of the loss tokens: 0.1, 1, 0 | -1, 0.1 | -2.1
    result = correct(batch, preset("token_tis"))
    close(result.weights, [0, math.exp(0.1), 2.0, 1.0, 0, math.exp(-1.0), math.exp(0.1), 0, math.exp(-2.1)])
    assert result.keep_mask.tolist() == batch.loss_mask.tolist()
    assert result.alpha is None


def test_icepop_drops_ratios_outside_the_range_and_leaves_the_rest_uncapped(packed: Make) -> None:
    result = correct(packed(), preset("icepop"))
    close(result.weights, [0, math.exp(0.1), math.e, 1.0, 0, 0, math.exp(0.1), 0, 0])
    assert result.keep_mask.tolist() == [False, True, True, True, False, False, True, False, False]


def test_none_gives_weight_one(packed: Make) -> None:
    result = correct(packed(), preset("none"))
    close(result.weights, [0, 1, 1, 1, 0, 1, 1, 0, 1])


def test_a_mask_without_weights_drops_tokens_and_weighs_the_rest_one(packed: Make) -> None:
    close(weigh(packed(), Correction(level="none", mask_high=2.0)).weights, [0, 1, 0, 1, 0, 1, 1, 0, 1])


def test_mask_bounds_are_inclusive() -> None:
    half = Correction(mask_low=0.5, mask_high=2.0)
    batch = _flat(torch.tensor([0.5, 2.0, 0.4999, 2.0001], dtype=torch.float64).log())
    assert weigh(batch, half).keep_mask.tolist()[2:] == [False, False]
    exact = _flat(torch.zeros(1, dtype=torch.float64))
    assert weigh(exact, Correction(mask_low=1.0, mask_high=2.0)).keep_mask.tolist() == [True]
    assert weigh(exact, Correction(mask_low=0.5, mask_high=1.0)).keep_mask.tolist() == [True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_overflow_gives_the_cap_and_not_zero(dtype: torch.dtype) -> None:
    batch = _flat(torch.tensor([1000.0, 200.0, -200.0, 0.0], dtype=dtype))
    close(correct(batch, preset("token_tis")).weights, [2.0, 2.0, math.exp(-20.0), 1.0])
    close(correct(batch, preset("icepop")).weights, [0.0, 0.0, 0.0, 1.0])
    metrics = correct(batch, preset("token_tis")).metrics.result()
    assert metrics["correction/log_ratio_clamped/frac"] == 0.75
    assert metrics["correction/logprob_gap/max"] == 1000.0
    assert metrics["correction/truncated/frac"] == 0.5


def test_equal_logprobs_are_exactly_on_policy(packed: Make) -> None:
    logprobs = packed().rollout_logprobs
    for name in ("none", "token_tis", "icepop"):
        result = correct(packed(proximal_logprobs=logprobs), preset(name))
        assert torch.equal(result.weights, packed().loss_mask.float())
        assert result.metrics.result()["correction/kl_k3/mean"] == 0.0


def test_rollout_logprobs_shifted_by_log_two_halve_every_ratio(packed: Make) -> None:
    batch = packed(proximal_logprobs=packed().rollout_logprobs - math.log(2.0))
    result = correct(batch, preset("token_tis"))
    torch.testing.assert_close(result.weights[batch.loss_mask], torch.full((6,), 0.5))
    assert result.metrics.result()["correction/ratio/max"] == pytest.approx(0.5, rel=1e-6)


def test_results_are_detached_even_when_the_logprobs_are_not(packed: Make) -> None:
    result = correct(packed(proximal_logprobs=packed().proximal_logprobs.requires_grad_()), preset("token_tis"))
    assert not result.weights.requires_grad


def test_nan_at_a_loss_token_is_never_dropped_in_silence() -> None:
    batch = _flat(torch.tensor([float("nan"), 0.0]))
    for name in ("token_tis", "icepop"):
        result = weigh(batch, preset(name))
        assert result.weights[0].isnan()
        assert result.keep_mask[0]


def test_an_all_masked_batch_gives_zero_weights_and_no_metrics(packed: Make) -> None:
    result = correct(packed(loss_mask=torch.zeros(9, dtype=torch.bool)), preset("icepop"))
    assert not result.weights.any()
    assert not result.keep_mask.any()
    assert result.metrics.result() == {}


def test_a_batch_without_tokens_is_fine() -> None:
    assert correct(_flat(torch.zeros(0)), preset("token_tis")).metrics.result() == {}


def _flat(log_ratio: torch.Tensor) -> CorrectionBatch:
    """One sequence with the given log-ratios, every token a loss token."""
    tokens = len(log_ratio)
    return CorrectionBatch(rollout_logprobs=torch.zeros_like(log_ratio), proximal_logprobs=log_ratio, advantages=torch.ones_like(log_ratio),
                           loss_mask=torch.ones(tokens, dtype=torch.bool), turn_ids=torch.zeros(tokens, dtype=torch.int16),
                           policy_versions=torch.zeros(tokens, dtype=torch.int32), cu_seqlens=torch.tensor([0, tokens]),
                           group_ids=torch.tensor([0]), version=0)
