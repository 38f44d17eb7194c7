import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from asyncrl.correction import Bounds, Correction, CorrectionBatch, correct, preset
from asyncrl.correction.buckets import Spread, ess_frac, quantiles
from asyncrl.correction.diagnostics import diagnose_update
from asyncrl.correction.losses import ppo
from asyncrl.correction.rules import veto
from tests.correction.loss_inputs import loss_inputs

Make = Callable[..., CorrectionBatch]


def test_every_metric_of_three_sequences_by_hand(packed: Make) -> None:
    got = correct(packed(), preset("token_tis")).metrics.result()
    log_ratio = [0.1, 1.0, 0.0, -1.0, 0.1, -2.1]  # of staleness 2, 2, 1, 0, 0, 0
    wanted = {"correction/kl_k1/mean": 1.9 / 6, "correction/logprob_gap/mean": 4.3 / 6, "correction/logprob_gap/max": 2.1,
              "correction/log_ratio/min": -2.1, "correction/log_ratio/max": 1.0, "correction/truncated/frac": 1 / 6,
              "correction/ratio/mean": sum(map(math.exp, log_ratio)) / 6, "correction/ratio/max": math.e,
              "correction/weight/mean": (2 * math.exp(0.1) + 2.0 + 1.0 + math.exp(-1) + math.exp(-2.1)) / 6,
              "correction/kl_k1_staleness_2/mean": -0.55, "correction/kl_k1_staleness_0/mean": 1.0,
              "correction/logprob_gap_staleness_1/mean": 0.0, "correction/truncated_staleness_2/frac": 0.5,
              "correction/kept_sequences/frac": 1.0, "correction/rollout_log_ppl/mean": (3.5 / 3 + 1.7 / 2 + 0.9) / 3,
              "correction/chi2_sequence/mean": (math.exp(2.2) + math.exp(-1.8) + math.exp(-4.2)) / 3 - 1.0,
              "correction/gap_by_mismatch/value": 3.2 / 3, "correction/gap_by_drift/value": 4.3 / 6 - 3.2 / 3,
              "correction/gap_drift_per_version/value": (4.3 / 6 - 3.2 / 3) / (5 / 6)}
    assert {name: got[name] for name in wanted} == pytest.approx(wanted, rel=1e-6, abs=1e-7)
    assert {name.split("/")[1].partition("_staleness_")[2] for name in got} == {"", "0", "1", "2"}


def test_an_engine_that_is_off_by_0_3_shows_as_mismatch_at_staleness_zero(packed: Make) -> None:
    batch = packed(proximal_logprobs=packed().rollout_logprobs - 0.3, policy_versions=torch.where(packed().loss_mask, 5, -1))
    got = correct(batch, preset("none")).metrics.result()
    assert got["correction/logprob_gap_staleness_0/mean"] == pytest.approx(0.3, rel=1e-6)
    assert got["correction/kl_k1_staleness_0/mean"] == pytest.approx(0.3, rel=1e-6)
    assert not [name for name in got if "staleness_1" in name]


def test_kept_counts_what_the_mask_dropped_against_the_original_tokens(packed: Make) -> None:
    got = correct(packed(), preset("icepop")).metrics.result()
    assert got["correction/kept/frac"] == pytest.approx(4 / 6)
    assert "correction/truncated/frac" not in got


def test_tokens_older_than_eight_steps_share_a_bucket(packed: Make) -> None:
    got = correct(packed(version=13), Correction()).metrics.result()
    names = {name.split("/")[1].removeprefix("weight") for name in got if name.startswith("correction/weight")}
    assert names == {"", "_staleness_8", "_staleness_9_plus"}


def test_no_surviving_token_means_no_effective_sample_size() -> None:
    tokens = torch.tensor([-1.0, -2.0])
    batch = CorrectionBatch(rollout_logprobs=tokens, proximal_logprobs=tokens - 5.0, advantages=tokens,
                            loss_mask=torch.tensor([True, True]), turn_ids=torch.zeros(2, dtype=torch.int16),
                            policy_versions=torch.zeros(2, dtype=torch.int32), cu_seqlens=torch.tensor([0, 2]),
                            group_ids=torch.tensor([0]), version=0)
    got = correct(batch, preset("icepop")).metrics.result()
    assert got["correction/kept/frac"] == 0.0
    assert "correction/ess/frac" not in got
    assert all(math.isfinite(value) for value in got.values())


def test_raw_and_clamped_log_ratios_are_both_shown(packed: Make) -> None:
    batch = packed(rollout_logprobs=torch.full((9,), -31.0), proximal_logprobs=torch.tensor([0.0, -1.0, *[-31.0] * 7]))
    got = correct(batch, Correction(level="sequence", truncate_high=2.0)).metrics.result()
    assert got["correction/log_ratio/max"] == got["correction/logprob_gap/max"] == got["correction/sequence_log_ratio/max"] == 30.0
    assert got["correction/ratio/max"] == got["correction/sequence_ratio/max"] == pytest.approx(math.exp(20.0))
    assert got["correction/log_ratio_clamped/frac"] == pytest.approx(1 / 6)
    assert got["correction/sequence_log_ratio_clamped/frac"] == 0.5  # its three tokens


def test_what_each_rule_and_bound_drops_has_its_own_fraction(packed: Make) -> None:
    correction = Correction(mask_low=0.5, denominator="kept", reject=(veto(0.13), Bounds(statistic="k1", low=-0.5, name="up")))
    got = correct(packed(), correction).metrics.result()
    assert got["correction/masked/frac"] == pytest.approx(2 / 6)  # e^-1 and e^-2.1
    assert got["correction/rejected_veto/frac"] == pytest.approx(1 / 6)  # the sequence of e^-2.1
    assert got["correction/rejected_up_staleness_2/frac"] == 0.5  # e^1
    assert got["correction/rejected_up_staleness_0/frac"] == 0.0
    assert got["correction/kept/frac"] == 0.5
    assert got["correction/kept_denominator_factor/value"] == 2.0
    assert got["correction/kept_sequences/frac"] == pytest.approx(2 / 3)


def test_a_normalised_weight_has_its_mean_from_before(packed: Make) -> None:
    plain = correct(packed(), Correction(truncate_high=2.0)).metrics.result()
    got = correct(packed(), Correction(truncate_high=2.0, normalize="token")).metrics.result()
    assert got["correction/weight/mean"] == pytest.approx(1.0)
    for quantity in ("", "_staleness_0", "_staleness_2"):
        assert got[f"correction/weight_unnormalized{quantity}/mean"] == pytest.approx(plain[f"correction/weight{quantity}/mean"])
        assert got[f"correction/ess{quantity}/frac"] == pytest.approx(plain[f"correction/ess{quantity}/frac"])
    assert not [name for name in plain if "unnormalized" in name]


def test_nothing_is_measured_on_guessed_logprobs_nor_on_no_tokens(packed: Make) -> None:
    assert correct(packed(), Correction(proximal="log_linear")).metrics.result() == {}
    assert correct(packed(loss_mask=torch.zeros(9, dtype=torch.bool)), preset("token_tis")).metrics.result() == {}


def test_a_mismatch_of_a_billionth_keeps_its_digits(packed: Make) -> None:
    rollout = torch.full((9,), -1e-9, dtype=torch.float64)
    batch = packed(rollout_logprobs=rollout, proximal_logprobs=rollout * torch.tensor([1.0, 2.0, 3.0, 2.0, 1.0, 4.0, 5.0, 1.0, 2.0]))
    got = correct(batch, preset("none")).metrics.result()
    gaps = np.array([1.0, 2.0, 1.0, 3.0, 4.0, 1.0]) * 1e-9
    assert got["correction/kl_k3/mean"] == pytest.approx(np.mean(gaps**2) / 2, rel=1e-6)
    assert got["correction/chi2/mean"] == pytest.approx(-2 * gaps.mean(), rel=1e-6)
    assert got["correction/prob_gap/std"] == pytest.approx(gaps.std(ddof=1), rel=1e-6)


def test_probabilities_near_one_are_correlated_without_loss_of_digits(packed: Make) -> None:
    rollout = -torch.tensor([1.0, 2.0, 4.0, 3.0, 1.0, 5.0, 7.0, 1.0, 6.0], dtype=torch.float64)
    batch = packed(rollout_logprobs=rollout * 1e-12, proximal_logprobs=rollout.flip(0) * 1e-12)
    got = correct(batch, preset("none")).metrics.result()["correction/prob_pearson/value"]
    mask = batch.loss_mask.numpy()
    assert got == pytest.approx(np.corrcoef(rollout.numpy()[mask], rollout.numpy()[::-1][mask])[0, 1], rel=1e-6)


def test_effective_sample_size_of_one_dominant_weight_is_one_over_n() -> None:
    def ess(*weights: float) -> float:
        return ess_frac(sum(weights), squares=sum(weight**2 for weight in weights), count=len(weights))

    assert ess(1.0, 1.0, 1.0, 1.0) == 1.0
    assert ess(1e6, 0.0, 0.0, 0.0) == 0.25
    assert ess(0.2, 0.5, 1.0, 4.0) == pytest.approx(1.87912088 / 4)
    assert math.isnan(ess(0.0, 0.0))


def test_pearson_of_a_constant_is_undefined() -> None:
    def correlation(x: list[float], y: list[float]) -> float:
        return Spread.of(np.array(x), np.array(y)).pearson(0, 1)

    assert correlation([0.1, 0.2, 0.4], [1.3, 1.6, 2.2]) == pytest.approx(1.0)
    assert correlation([0.1, 0.2, 0.4], [-0.1, -0.2, -0.4]) == pytest.approx(-1.0)
    assert math.isnan(correlation([0.1, 0.2, 0.4], [0.1, 0.1, 0.1]))
    assert math.isnan(correlation([0.1], [0.2]))
    assert math.isnan(correlation([0.1 + 0.2] * 7, [0.3, 0.1, 0.2, 0.4, 0.5, 0.6, 0.7]))


def test_a_spread_of_nearly_equal_values_keeps_its_digits_however_it_is_summed() -> None:
    x = 0.7 + 1e-9 * np.array([0.0, 1.0, 3.0, 2.0, 7.0])
    y = 0.2 - 2e-9 * np.array([0.0, 1.0, 3.0, 2.0, 7.0])
    whole = Spread.of(x, y)
    joined = Spread.of(x[:2], y[:2]) + (Spread.of(x[2:3], y[2:3]) + Spread.of(x[3:], y[3:]))
    for spread in (whole, joined):
        assert spread.pearson(0, 1) == pytest.approx(-1.0, abs=1e-6)
        assert spread.deviation(0) == pytest.approx(np.array([0.0, 1.0, 3.0, 2.0, 7.0]).std(ddof=1) * 1e-9, rel=1e-6)
    assert Spread.of(x[:2], y[:2]).pearson(0, 1) == pytest.approx(-1.0, abs=1e-12)


def test_quantiles_interpolate_linearly() -> None:
    values = np.random.default_rng(0).normal(size=101)
    levels = (0.0, 0.013, 0.5, 0.99, 1.0)
    np.testing.assert_allclose(quantiles(values, levels=levels), np.quantile(values, levels), rtol=1e-12)
    np.testing.assert_allclose(quantiles(values[:40], values[40:], levels=levels), np.quantile(values, levels), rtol=1e-12)
    assert quantiles(values[:1], levels=(0.01, 0.99)) == [values[0]] * 2


def test_update_metrics_count_clips_over_the_original_tokens() -> None:
    rollout = torch.zeros(4, dtype=torch.float64)
    mask = torch.tensor([True, True, True, False])
    inputs = loss_inputs(torch.tensor([-1.0, 1.0, 1.0, 1.0], dtype=torch.float64), rollout_logprobs=rollout, keep_mask=mask)
    result = ppo(torch.tensor([math.log(0.5), 0.0, 1000.0, 7.0], dtype=torch.float64), inputs=inputs)
    got = diagnose_update(result.log_ratio, clipped=result.clipped, loss_mask=mask).result()
    assert got["correction/clipped/frac"] == pytest.approx(2 / 3)
    assert got["correction/update_log_ratio_clamped/frac"] == pytest.approx(1 / 3)
    assert got["correction/update_ratio/min"] == pytest.approx(0.5)
    assert got["correction/update_ratio/max"] == pytest.approx(math.exp(20.0))
    assert got["correction/update_kl_k1/mean"] == pytest.approx((math.log(2.0) - 1000.0) / 3)


def test_update_metrics_are_also_by_staleness() -> None:
    log_ratio, clipped = torch.tensor([0.1, -0.3, 25.0, 9.0]), torch.tensor([False, True, True, True])
    mask, staleness = torch.tensor([True, True, True, False]), torch.tensor([0, 0, 11, 1])
    got = diagnose_update(log_ratio, clipped=clipped, loss_mask=mask, staleness=staleness).result()
    plain = diagnose_update(log_ratio, clipped=clipped, loss_mask=mask).result()
    wanted = {"clipped_staleness_0/frac": 0.5, "clipped_staleness_9_plus/frac": 1.0, "update_kl_k1_staleness_0/mean": 0.1,
              "update_kl_k3_staleness_0/mean": (math.expm1(0.1) + math.expm1(-0.3) + 0.2) / 2,
              "update_ratio_staleness_0/min": math.exp(-0.3), "update_ratio_staleness_0/max": math.exp(0.1),
              "update_ratio_staleness_9_plus/min": math.exp(20.0),
              "update_log_ratio_clamped_staleness_9_plus/frac": 1.0, "update_log_ratio_clamped_staleness_0/frac": 0.0}
    assert {name: got[f"correction/{name}"] for name in wanted} == pytest.approx(wanted, rel=1e-6, abs=1e-7)
    assert not [name for name in got if "staleness_1" in name]
    assert {name: value for name, value in got.items() if "staleness" not in name} == pytest.approx(plain, rel=1e-12)


def test_the_first_update_has_ratio_exactly_one_and_an_empty_one_has_no_metrics() -> None:
    logprobs, mask = torch.tensor([-1.3, -0.7]), torch.tensor([True, True])
    result = ppo(logprobs, inputs=loss_inputs(torch.ones(2), rollout_logprobs=logprobs, keep_mask=mask))
    got = diagnose_update(result.log_ratio, clipped=result.clipped, loss_mask=mask).result()
    assert got["correction/update_ratio/min"] == got["correction/update_ratio/max"] == 1.0
    assert got["correction/clipped/frac"] == 0.0
    assert diagnose_update(result.log_ratio, clipped=result.clipped, loss_mask=~mask).result() == {}
