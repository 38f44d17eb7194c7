"""Every metric against its formula in plain NumPy, over all loss tokens and in every bucket, for corrections of every kind."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from asyncrl.correction import Bounds, Correction, CorrectionBatch, SecondMoment, correct
from asyncrl.correction.rules import veto
from asyncrl.correction.weights import apply

CORRECTIONS = {
    "none": Correction(level="none"),
    "one cap": Correction(truncate_high=1.5),
    "both bounds": Correction(truncate_low=0.5, truncate_high=1.5, normalize="token"),
    "by staleness": Correction(truncate_high=(3.0, 2.0, 1.2), mask_low=(0.1, 0.2)),
    "clamped": Correction(log_clamp=1.0),
    "turns": Correction(level="turn", reduce="mean", mask_low=0.5, mask_high=2.0, denominator="kept"),
    "sequences": Correction(level="sequence", truncate_high=4.0, normalize="sequence"),
    "rules": Correction(reject=(veto(0.05), Bounds(statistic="k3", high=0.5), SecondMoment(limit=0.5)), denominator="kept"),
}
GARBAGE = (float("nan"), float("inf"), -float("inf"), 1e30, 5.0)


def draw(seed: int, *, garbage: float) -> CorrectionBatch:
    """A random float64 batch of up to seven sequences over two turns each; `garbage` lies wherever the mask is off."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 12, size=rng.integers(1, 8))
    tokens = int(lengths.sum())
    mask = rng.random(tokens) > 0.3

    def floats(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.where(mask, values, garbage))

    return CorrectionBatch(
        rollout_logprobs=floats(-rng.exponential(1.0, tokens)), proximal_logprobs=floats(-rng.exponential(1.0, tokens)),
        advantages=floats(rng.normal(size=tokens)), loss_mask=torch.from_numpy(mask), turn_ids=torch.from_numpy(rng.integers(0, 2, tokens)),
        policy_versions=torch.from_numpy(np.where(mask, rng.integers(0, 13, tokens), -1)),
        cu_seqlens=torch.from_numpy(np.concatenate([[0], lengths.cumsum()])), group_ids=torch.arange(len(lengths)), version=12)


def ess(weights: np.ndarray) -> float:
    return np.sum(weights) ** 2 / (len(weights) * np.sum(weights**2)) if weights.any() else np.nan


def ratio_metrics(log_ratio: np.ndarray, *, clamp: float, prefix: str = "") -> dict[str, float]:
    ratio = np.exp(np.clip(log_ratio, -clamp, clamp))
    return {f"{prefix}log_ratio/min": log_ratio.min(), f"{prefix}log_ratio/max": log_ratio.max(),
            f"{prefix}log_ratio_clamped/frac": np.mean(np.abs(log_ratio) > clamp), f"{prefix}ratio/mean": ratio.mean(),
            f"{prefix}ratio/max": ratio.max(), f"{prefix}ratio/p01": np.quantile(ratio, 0.01), f"{prefix}ratio/p50": np.median(ratio),
            f"{prefix}ratio/p99": np.quantile(ratio, 0.99), f"{prefix}ess_raw/frac": ess(ratio)}


def token_metrics(rollout: np.ndarray, proximal: np.ndarray, *, clamp: float) -> dict[str, float]:
    log_ratio, q, p = proximal - rollout, np.exp(rollout), np.exp(proximal)
    held, below = np.clip(log_ratio, -clamp, clamp), np.minimum(log_ratio, clamp)
    values = {"kl_k1/mean": -log_ratio.mean(), "kl_k3/mean": np.mean(np.exp(below) - 1 - below),
              "chi2/mean": np.mean(np.exp(held) ** 2) - 1,
              "logprob_gap/mean": np.abs(log_ratio).mean(), "logprob_gap/max": np.abs(log_ratio).max(),
              "mult_prob_error/mean": np.exp(np.abs(held)).mean(), "prob_gap/mean": np.abs(p - q).mean(),
              "prob_gap/max": np.abs(p - q).max()} | ratio_metrics(log_ratio, clamp=clamp)
    if len(p) > 1:
        values |= {"prob_gap/std": np.abs(p - q).std(ddof=1), "prob_pearson/value": np.corrcoef(p, q)[0, 1]}
    return values


def wanted_metrics(batch: CorrectionBatch, correction: Correction) -> dict[str, float]:
    weighed = apply(batch, correction)
    mask = batch.loss_mask.numpy()
    arrays = {name: tensor.numpy()[mask] for name, tensor in (
        ("rollout", batch.rollout_logprobs), ("proximal", batch.proximal_logprobs),
        ("level", weighed.level_log_ratio), ("weight", weighed.corrected.weights), ("kept", weighed.corrected.keep_mask),
        *((f"rejected_{name}", dropped) for name, dropped in weighed.rejected.items()))}
    arrays["ratio"] = np.exp(np.clip(arrays["level"], -correction.log_clamp, correction.log_clamp))
    staleness = 12 - batch.policy_versions.numpy()[mask]

    def bound(value: object) -> object:
        return np.array(value)[np.minimum(staleness, len(value) - 1)] if isinstance(value, tuple) else value

    for name, field in (("truncated", "truncate"), ("masked", "mask")):
        low, high = bound(getattr(correction, f"{field}_low")), bound(getattr(correction, f"{field}_high"))
        if low is not None or high is not None:
            below = arrays["ratio"] < (0.0 if low is None else low)
            arrays[name] = below | (arrays["ratio"] > (np.inf if high is None else high))
    if "truncated" in arrays:
        arrays["truncated"] &= arrays["kept"]
    found: dict[str, float] = {}
    buckets = {"": np.ones(len(staleness), bool)} | {f"_staleness_{age}": staleness == age for age in range(9)}
    for suffix, rows in {**buckets, "_staleness_9_plus": staleness > 8}.items():
        if rows.any():
            here = {name: values[rows] for name, values in arrays.items()}
            values = token_metrics(here["rollout"], here["proximal"], clamp=correction.log_clamp)
            values |= {"weight/mean": here["weight"].mean(), "ess/frac": ess(here["weight"])}
            values |= {f"{name}/frac": column.mean() for name, column in here.items() if column.dtype == bool}
            if correction.normalize:
                values["weight_unnormalized/mean"] = np.mean(here["weight"] * weighed.normalizer.item())
            if correction.level in ("turn", "sequence"):
                values |= ratio_metrics(here["level"], clamp=correction.log_clamp, prefix=f"{correction.level}_")
            found |= {f"correction/{name.replace('/', suffix + '/')}": value for name, value in values.items()}
    return found | {f"correction/{name}": value for name, value in {
        **whole_metrics(np.abs(arrays["proximal"] - arrays["rollout"]), staleness=staleness, kept=arrays["kept"], correction=correction),
        **sequence_metrics(batch, kept=weighed.corrected.keep_mask.numpy(), clamp=correction.log_clamp)}.items()}


def whole_metrics(gap: np.ndarray, *, staleness: np.ndarray, kept: np.ndarray, correction: Correction) -> dict[str, float]:
    values = {}
    if correction.denominator == "kept" and kept.any():
        values["kept_denominator_factor/value"] = len(kept) / kept.sum()
    if (staleness == 0).any():
        drift = gap.mean() - gap[staleness == 0].mean()
        values |= {"gap_by_mismatch/value": gap[staleness == 0].mean(), "gap_by_drift/value": drift}
        if staleness.any():
            values["gap_drift_per_version/value"] = drift / staleness.mean()
    return values


def sequence_metrics(batch: CorrectionBatch, *, kept: np.ndarray, clamp: float) -> dict[str, float]:
    rows = []
    for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        mask = batch.loss_mask.numpy()[start:end]
        if mask.any():
            rollout, proximal = (values.numpy()[start:end][mask] for values in (batch.rollout_logprobs, batch.proximal_logprobs))
            rows.append((np.exp(2 * np.clip(proximal.sum() - rollout.sum(), -clamp, clamp)) - 1, -rollout.mean(), -proximal.mean(),
                         rollout.mean() - proximal.mean(), kept[start:end].any()))
    names = ("chi2_sequence/mean", "rollout_log_ppl/mean", "proximal_log_ppl/mean", "log_ppl_gap/mean", "kept_sequences/frac")
    return dict(zip(names, np.mean(rows, axis=0).tolist(), strict=True))


@pytest.mark.parametrize("correction", CORRECTIONS.values(), ids=CORRECTIONS)
@given(seed=st.integers(0, 2**32 - 1), garbage=st.sampled_from(GARBAGE))
@example(seed=657871457, garbage=math.nan)  # two tokens of a bucket are of nearly the same probability
def test_every_metric_is_its_formula_over_all_tokens_and_in_every_bucket(correction: Correction, seed: int, garbage: float) -> None:
    batch = draw(seed, garbage=garbage)
    got = correct(batch, correction).metrics.result()
    if not batch.loss_mask.any():
        assert got == {}
        return
    wanted = {name: value for name, value in wanted_metrics(batch, correction).items() if not np.isnan(value)}
    assert got.keys() == wanted.keys()
    assert got == pytest.approx(wanted, rel=1e-7, abs=1e-9)


@pytest.mark.parametrize("correction", CORRECTIONS.values(), ids=CORRECTIONS)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_order_of_tokens_within_a_sequence_changes_no_metric(correction: Correction, seed: int) -> None:
    batch = draw(seed, garbage=5.0)
    bounds = batch.cu_seqlens.tolist()
    places = torch.cat([torch.arange(start, end).flip(0) for start, end in itertools.pairwise(bounds)])
    turned = replace(batch, **{name: getattr(batch, name)[places] for name in (
        "rollout_logprobs", "proximal_logprobs", "advantages", "loss_mask", "turn_ids", "policy_versions")})
    assert correct(turned, correction).metrics.result() == pytest.approx(correct(batch, correction).metrics.result(), rel=1e-9, abs=1e-12)
