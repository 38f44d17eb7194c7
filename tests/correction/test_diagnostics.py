import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from asyncrl.correction import Correction, CorrectionBatch, correct, preset
from asyncrl.correction.diagnostics import diagnose_update, ess_frac, pearson, quantiles
from asyncrl.correction.losses import ppo
from tests.correction.loss_inputs import loss_inputs

Make = Callable[..., CorrectionBatch]


def by_hand(rollout: np.ndarray, proximal: np.ndarray, *, weights: np.ndarray, suffix: str = "") -> dict[str, float]:
    """Every token metric of loss tokens [n], written out in NumPy."""
    log_ratio = proximal - rollout
    ratio, p, q = np.exp(log_ratio), np.exp(proximal), np.exp(rollout)
    values = {
        "kl_k1/mean": np.mean(-log_ratio), "kl_k3/mean": np.mean(ratio - 1 - log_ratio), "chi2/mean": np.mean(ratio**2) - 1,
        "ratio/mean": ratio.mean(), "ratio/max": ratio.max(), "ratio/p01": np.quantile(ratio, 0.01), "ratio/p50": np.median(ratio),
        "ratio/p99": np.quantile(ratio, 0.99), "weight/mean": weights.mean(), "logprob_gap/mean": np.abs(log_ratio).mean(),
        "logprob_gap/max": np.abs(log_ratio).max(), "prob_gap/mean": np.abs(p - q).mean(), "prob_gap/max": np.abs(p - q).max(),
        "mult_prob_error/mean": np.exp(np.abs(log_ratio)).mean(), "log_ratio_clamped/frac": 0.0,
        "ess/frac": weights.sum()**2 / (len(weights) * (weights**2).sum()),
        "ess_raw/frac": ratio.sum()**2 / (len(ratio) * (ratio**2).sum()),
    }
    if len(ratio) > 1:
        values |= {"prob_gap/std": np.abs(p - q).std(ddof=1), "prob_pearson/value": np.corrcoef(p, q)[0, 1]}
    return {f"correction/{name.replace('/', suffix + '/')}": value for name, value in values.items()}


def test_every_token_metric_equals_its_formula_over_all_and_by_staleness(packed: Make) -> None:
    batch = packed(rollout_logprobs=packed().rollout_logprobs.double(), proximal_logprobs=packed().proximal_logprobs.double())
    got = correct(batch, preset("token_tis")).metrics.result()
    rollout = np.array([-1.0, -2.0, -0.5, -1.0, -0.7, -0.9], np.float32).astype(float)
    proximal = np.array([-0.9, -1.0, -0.5, -2.0, -0.6, -3.0], np.float32).astype(float)
    staleness = np.array([2, 2, 1, 0, 0, 0])
    weights, truncated = np.minimum(np.exp(proximal - rollout), 2.0), np.exp(proximal - rollout) > 2.0
    wanted = by_hand(rollout, proximal, weights=weights) | {"correction/kept/frac": 1.0, "correction/truncated/frac": truncated.mean()}
    for bucket in (0, 1, 2):
        rows, suffix = staleness == bucket, f"_staleness_{bucket}"
        wanted |= by_hand(rollout[rows], proximal[rows], weights=weights[rows], suffix=suffix)
        wanted |= {f"correction/kept{suffix}/frac": 1.0, f"correction/truncated{suffix}/frac": truncated[rows].mean()}
    sums = np.array([[-3.5, -2.4, 3], [-1.7, -2.6, 2], [-0.9, -3.0, 1]])
    wanted |= {"correction/chi2_sequence/mean": np.mean(np.exp(2 * (sums[:, 1] - sums[:, 0]))) - 1,
               "correction/rollout_log_ppl/mean": np.mean(-sums[:, 0] / sums[:, 2]),
               "correction/proximal_log_ppl/mean": np.mean(-sums[:, 1] / sums[:, 2]),
               "correction/log_ppl_gap/mean": np.mean((sums[:, 0] - sums[:, 1]) / sums[:, 2])}
    assert got.keys() == wanted.keys()
    assert got == pytest.approx(wanted, rel=1e-6, abs=1e-9)


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
    names = {name.split("/")[1].removeprefix("kept") for name in got if name.startswith("correction/kept")}
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


def test_effective_sample_size_of_one_dominant_weight_is_one_over_n() -> None:
    assert ess_frac(torch.tensor([1.0, 1.0, 1.0, 1.0])).item() == 1.0
    assert ess_frac(torch.tensor([1e6, 0.0, 0.0, 0.0])).item() == 0.25
    assert ess_frac(torch.tensor([0.2, 0.5, 1.0, 4.0])).item() == pytest.approx(1.87912088 / 4)
    assert ess_frac(torch.zeros(3)).isnan()


def test_pearson_of_a_constant_is_undefined() -> None:
    x = torch.tensor([0.1, 0.2, 0.4], dtype=torch.float64)
    assert pearson(x, y=3 * x + 1).item() == pytest.approx(1.0)
    assert pearson(x, y=-x).item() == pytest.approx(-1.0)
    assert pearson(x, y=torch.full((3,), 0.1, dtype=torch.float64)).isnan()
    assert pearson(x[:1], y=x[:1]).isnan()


def test_quantiles_interpolate_linearly() -> None:
    values = np.random.default_rng(0).normal(size=101)
    got = quantiles(torch.from_numpy(values), levels=(0.0, 0.013, 0.5, 0.99, 1.0))
    np.testing.assert_allclose(got.numpy(), np.quantile(values, [0.0, 0.013, 0.5, 0.99, 1.0]), rtol=1e-12)


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


def test_the_first_update_has_ratio_exactly_one_and_an_empty_one_has_no_metrics() -> None:
    logprobs, mask = torch.tensor([-1.3, -0.7]), torch.tensor([True, True])
    result = ppo(logprobs, inputs=loss_inputs(torch.ones(2), rollout_logprobs=logprobs, keep_mask=mask))
    got = diagnose_update(result.log_ratio, clipped=result.clipped, loss_mask=mask).result()
    assert got["correction/update_ratio/min"] == got["correction/update_ratio/max"] == 1.0
    assert got["correction/clipped/frac"] == 0.0
    assert diagnose_update(result.log_ratio, clipped=result.clipped, loss_mask=~mask).result() == {}
