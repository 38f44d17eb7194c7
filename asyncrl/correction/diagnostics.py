"""How far off-policy a batch is, and what a correction did about it: once a step, on the whole batch, from all its loss tokens.

Three causes show in three places: the gap at staleness 0 is the mismatch between engine and trainer, its growth over the
staleness buckets is what the policy drifted since (`gap.py`), and `kept`, `truncated` and `rejected` say what the correction cut away.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncrl.correction.batch import CorrectionBatch, Weighed
from asyncrl.correction.buckets import Spread, Summary, Values, by_staleness, ess_frac, on_host, record_finished
from asyncrl.correction.gap import estimated_split
from asyncrl.correction.rejection import outside_ratios
from asyncrl.correction.spec import LOG_CLAMP, Correction
from asyncrl.metrics import Metrics


@torch.no_grad()
def diagnose(batch: CorrectionBatch, *, correction: Correction, weighed: Weighed) -> Metrics:
    """Metrics of one batch, absent where there is nothing to measure; docs/correction.md lists them.

    `correction/QUANTITY/STAT` over all loss tokens; `correction/QUANTITY_staleness_S/STAT` over those S steps old (9_plus:
    older than 8). Quantities of whole sequences have no buckets, a sequence may hold several versions. Every mean, fraction
    and quantile is of the whole batch: merge over sources or steps, not over pieces of one batch.

    Log-linear proximal logprobs are a guess, and nothing is measured on a guess: no metrics at all. Waits for the device.
    """
    metrics, corrected = Metrics(), weighed.corrected
    staleness = batch.version - batch.policy_versions.int()
    buckets = by_staleness(batch.loss_mask, staleness)
    if not buckets or corrected.alpha is not None:
        return metrics
    columns = _columns(batch, correction=correction, weighed=weighed)
    normalizer = None if weighed.normalizer is None else float(weighed.normalizer)
    summaries = {f"_staleness_{label}": _summary({name: column.take(places) for name, column in columns.items()}, correction=correction,
                                                 normalizer=normalizer) for label, places in buckets.items()}
    whole = functools.reduce(operator.add, summaries.values())
    for suffix, summary in {"": whole, **summaries}.items():
        summary.record(metrics, suffix=suffix)
        record_finished(metrics, _of_products(summary), suffix=suffix)
    mean_staleness = _total_staleness(staleness, buckets=buckets) / whole.count
    record_finished(metrics, estimated_split(summaries.get("_staleness_0"), whole=whole, mean_staleness=mean_staleness))
    kept = whole.means["kept/frac"]
    if correction.denominator == "kept" and kept:
        metrics.last("correction/kept_denominator_factor/value", whole.count / kept)
    _record_sequences(metrics, batch, keep_mask=corrected.keep_mask, log_clamp=correction.log_clamp)
    return metrics


@torch.no_grad()
def diagnose_update(log_ratio: Tensor, *, clipped: Tensor, loss_mask: Tensor, staleness: Tensor | None = None) -> Metrics:
    """Metrics of an update from the fields of its `PolicyLoss`es, concatenated: [T] each, the mask before correction.

    `update_ratio` is current / proximal: exactly 1 in the first update of a step. With `staleness`, [T] integers, by bucket too.
    Waits for the device.
    """
    metrics, values, held_back = Metrics(), on_host(log_ratio), on_host(clipped)
    buckets = by_staleness(loss_mask, torch.zeros_like(clipped, dtype=torch.int8) if staleness is None else staleness)
    summaries = {f"_staleness_{label}": _update_summary(values.take(places), clipped=held_back.take(places))
                 for label, places in buckets.items()}
    if summaries:
        functools.reduce(operator.add, summaries.values()).record(metrics)
    for suffix, summary in summaries.items() if staleness is not None else ():
        summary.record(metrics, suffix=suffix)
    return metrics


def _total_staleness(staleness: Tensor, *, buckets: Mapping[str, Values]) -> int:
    return sum(int(label) * len(places) if label.isdigit() else int(on_host(staleness).take(places).sum())
               for label, places in buckets.items())


def _columns(batch: CorrectionBatch, *, correction: Correction, weighed: Weighed) -> dict[str, Values]:
    """[T] what is summarised of each token."""
    corrected, level, log_ratio = weighed.corrected, correction.level, weighed.level_log_ratio
    keep_mask = on_host(corrected.keep_mask)
    columns = {"rollout": on_host(batch.rollout_logprobs), "proximal": on_host(batch.proximal_logprobs),
               "weight": on_host(corrected.weights), "kept": keep_mask}
    if correction.truncate_low is not None or correction.truncate_high is not None:
        beyond = outside_ratios(log_ratio, low=correction.truncate_low, high=correction.truncate_high, batch=batch)
        columns["truncated"] = keep_mask & on_host(beyond)
    if correction.mask_low is not None or correction.mask_high is not None:
        columns["masked"] = on_host(outside_ratios(log_ratio, low=correction.mask_low, high=correction.mask_high, batch=batch))
    if level in ("turn", "sequence"):
        columns[f"{level}_log_ratio"] = on_host(log_ratio)
    return columns | {f"rejected_{name}": on_host(dropped) for name, dropped in weighed.rejected.items()}


def _summary(columns: Mapping[str, Values], *, correction: Correction, normalizer: float | None) -> Summary:
    """Of the tokens of one bucket, [n] each."""
    rollout, proximal, weights = (columns[name].astype(np.float64) for name in ("rollout", "proximal", "weight"))
    means = {f"{name}/frac": float(np.count_nonzero(column)) for name, column in columns.items() if column.dtype == np.bool_}
    means["weight/mean"] = float(weights.sum())
    if normalizer is not None:
        means["weight_unnormalized/mean"] = means["weight/mean"] * normalizer
    digits, clamp = columns["weight"].dtype, correction.log_clamp
    parts = [_of_tokens(proximal - rollout, log_clamp=clamp, digits=digits), _of_probabilities(rollout, proximal=proximal)]
    if f"{correction.level}_log_ratio" in columns:
        level_log_ratio = columns[f"{correction.level}_log_ratio"].astype(np.float64)
        parts.append(_of_ratio(level_log_ratio, prefix=f"{correction.level}_", log_clamp=clamp, digits=digits)[0])
    return functools.reduce(Summary.joined, parts, Summary(len(weights), means, {"weight": float(weights @ weights)}))


def _of_ratio(log_ratio: Values, *, prefix: str, log_clamp: float, digits: np.dtype[Any]) -> tuple[Summary, Values, Values]:
    """Of tokens, or of the turn or sequence that each is in, named by the prefix; and [n] ℓ within the clamp, [n] ratios.

    Quantiles have the digits of the weights: numbers of half the size are sorted in half the time.
    """
    held, clamped = _held(log_ratio, log_clamp=log_clamp)
    ratio = np.exp(held)
    return Summary(
        len(ratio), {f"{prefix}ratio/mean": float(ratio.sum()), f"{prefix}log_ratio_clamped/frac": clamped},
        products={f"{prefix}ratio": float(ratio @ ratio)}, samples={f"{prefix}ratio": (ratio.astype(digits),)},
        largest={f"{prefix}ratio/max": float(ratio.max()), f"{prefix}log_ratio/max": float(log_ratio.max())},
        smallest={f"{prefix}log_ratio/min": float(log_ratio.min())}), held, ratio


def _of_tokens(log_ratio: Values, *, log_clamp: float, digits: np.dtype[Any]) -> Summary:
    summary, held, ratio = _of_ratio(log_ratio, prefix="", log_clamp=log_clamp, digits=digits)
    growth, gap, factor = np.expm1(held), np.abs(log_ratio), np.reciprocal(ratio)
    np.maximum(factor, ratio, out=factor)
    grown = float(growth.sum())
    means = {"kl_k1/mean": -float(log_ratio.sum()), "kl_k3/mean": _k3_sum(log_ratio, held=held, grown=grown, log_clamp=log_clamp),
             "chi2/mean": float(growth @ growth) + 2.0 * grown, "logprob_gap/mean": float(gap.sum()),
             "mult_prob_error/mean": float(factor.sum())}
    return summary.joined(Summary(len(gap), means, largest={"logprob_gap/max": float(gap.max())}))


def _of_probabilities(rollout: Values, *, proximal: Values) -> Summary:
    """From probabilities less 1: gap and correlation are the same, and a policy that is nearly certain loses no digits.

    What is no probability, a logprob far above 0, is held to what a float can square.
    """
    x, y = (np.expm1(np.minimum(logprobs, 300.0)) for logprobs in (proximal, rollout))
    gap = np.abs(x - y)
    return Summary(len(gap), {"prob_gap/mean": float(gap.sum())}, largest={"prob_gap/max": float(gap.max())},
                   spreads={"prob": Spread.of(x, y), "prob_gap": Spread.of(gap)})


def _of_products(summary: Summary) -> dict[str, float]:
    """What is made of several sums."""
    n, means, products = summary.count, summary.means, summary.products
    found = {"ess/frac": ess_frac(means["weight/mean"], squares=products["weight"], count=n),
             "prob_gap/std": summary.spreads["prob_gap"].deviation(0),
             "prob_pearson/value": summary.spreads["prob"].pearson(0, 1)}
    prefixes = [name.removesuffix("ratio") for name in summary.samples]
    return found | {f"{prefix}ess_raw/frac": ess_frac(means[f"{prefix}ratio/mean"], squares=products[f"{prefix}ratio"], count=n)
                    for prefix in prefixes}


def _update_summary(log_ratio: Values, *, clipped: Values) -> Summary:
    log_ratio = log_ratio.astype(np.float64)
    held, clamped = _held(log_ratio, log_clamp=LOG_CLAMP)
    grown = float(np.expm1(held).sum())
    means = {"clipped/frac": float(np.count_nonzero(clipped)), "update_kl_k1/mean": -float(log_ratio.sum()),
             "update_kl_k3/mean": _k3_sum(log_ratio, held=held, grown=grown, log_clamp=LOG_CLAMP), "update_log_ratio_clamped/frac": clamped}
    return Summary(len(held), means, largest={"update_ratio/max": math.exp(held.max())},
                   smallest={"update_ratio/min": math.exp(held.min())})


def _held(log_ratio: Values, *, log_clamp: float) -> tuple[Values, float]:
    """ℓ within ±log_clamp, and how many were beyond it."""
    if -log_clamp <= log_ratio.min() and log_ratio.max() <= log_clamp:
        return log_ratio, 0.0
    held = log_ratio.clip(-log_clamp, log_clamp)
    return held, float(np.count_nonzero(held != log_ratio))


def _k3_sum(log_ratio: Values, *, held: Values, grown: float, log_clamp: float) -> float:
    """Of `kl_k3`, which holds ℓ from above alone; `grown` is Σ (e^held − 1)."""
    if held is not log_ratio:
        held = np.minimum(log_ratio, log_clamp)
        grown = float(np.expm1(held).sum())
    return grown - float(held.sum())


def _record_sequences(metrics: Metrics, batch: CorrectionBatch, *, keep_mask: Tensor, log_clamp: float) -> None:
    """Of the sequences that have loss tokens, each counted once."""
    offsets, mask = on_host(batch.cu_seqlens), on_host(batch.loss_mask)
    starts = offsets[:-1][np.diff(offsets) > 0]

    def sums(values: Values) -> Values:
        return np.add.reduceat(values, starts, dtype=np.float64)

    lengths = sums(mask)
    counted = lengths > 0
    lengths, kept = lengths[counted], sums(on_host(keep_mask))[counted]
    rollout, proximal = (sums(np.where(mask, on_host(logprobs), 0.0))[counted]
                         for logprobs in (batch.rollout_logprobs, batch.proximal_logprobs))
    growth = np.expm1((proximal - rollout).clip(-log_clamp, log_clamp))
    means = {"chi2_sequence/mean": growth * (growth + 2.0), "rollout_log_ppl/mean": -rollout / lengths,
             "proximal_log_ppl/mean": -proximal / lengths, "log_ppl_gap/mean": (rollout - proximal) / lengths,
             "kept_sequences/frac": kept > 0}
    Summary(len(lengths), {name: float(values.sum()) for name, values in means.items()}).record(metrics)
