"""Off-policy metrics and the split of the gap, as `oracles.evaluate` asks for them: each kind of case through the public API."""

from __future__ import annotations

import math
from typing import Any

import torch

from asyncrl.correction import Correction, correct
from asyncrl.correction.buckets import quantiles
from asyncrl.correction.gap import mean_gap_by_staleness, split_gap
from asyncrl.correction.ratios import importance_ratio, masked_log_ratio
from tests.parity.padded import Inputs, Padded


def _metrics(inputs: Inputs, dtype: torch.dtype) -> dict[str, Any]:
    case = Padded(inputs, dtype)
    correction = Correction(truncate_high=inputs["cap"])
    got = correct(case.batch, correction).metrics.result()
    names = {"kl": "kl_k1/mean", "k3_kl": "kl_k3/mean", "chi2_token": "chi2/mean", "chi2_seq": "chi2_sequence/mean",
             "ess_fraction_raw": "ess_raw/frac", "ess_fraction_capped": "ess/frac", "logp_abs_diff_mean": "logprob_gap/mean",
             "logp_abs_diff_max": "logprob_gap/max", "prob_abs_diff_mean": "prob_gap/mean", "prob_abs_diff_max": "prob_gap/max",
             "prob_abs_diff_std": "prob_gap/std", "pearson_prob": "prob_pearson/value", "log_ppl_diff_mean": "log_ppl_gap/mean",
             "token_mult_prob_error": "mult_prob_error/mean"}
    rows = [Padded({name: [inputs[name][n]] for name in ("mask", "behave_logp", "prox_logp")}, dtype) for n in range(case.shape[0])]
    alone = [correct(row.batch, correction).metrics.result() for row in rows if row.batch.loss_mask.any()]
    mask = case.batch.loss_mask
    log_ratio = masked_log_ratio(case.batch.proximal_logprobs, sampled_logprobs=case.batch.rollout_logprobs, mask=mask)
    levels = (0.05, 0.5, 0.95)
    found = quantiles(importance_ratio(log_ratio[mask]).numpy(), levels=levels)
    return {name: got.get(f"correction/{metric}", math.nan) for name, metric in names.items()} | {
        "rollout_log_ppl": [row["correction/rollout_log_ppl/mean"] for row in alone],
        "training_log_ppl": [row["correction/proximal_log_ppl/mean"] for row in alone],
        "ratio_quantiles": {f"{level}": value for level, value in zip(levels, found, strict=True)}}


def _split(inputs: Inputs, dtype: torch.dtype) -> dict[str, Any]:
    rollout, same, proximal = (torch.tensor(inputs[name], dtype=dtype) for name in ("behave_logp", "same_version_logp", "prox_logp"))
    staleness = inputs["current_version"] - torch.tensor(inputs["token_version"])
    mask = torch.ones_like(staleness, dtype=torch.bool)
    split = split_gap(rollout, same_version_logprobs=same, proximal_logprobs=proximal, loss_mask=mask)
    gaps = mean_gap_by_staleness(split.total, staleness=staleness, loss_mask=mask)
    return {"mismatch": split.mismatch.tolist(), "lag": split.drift.tolist(), "total": split.total.tolist(),
            "staleness": staleness.tolist(), "mean_abs_log_ratio_by_staleness": {f"{age}": gap for age, gap in gaps.items()}}


CASES = {"metrics_offpolicy": _metrics, "mismatch_vs_lag_split": _split}
