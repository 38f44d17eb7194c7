"""Ratios, weights, rejection and decoupled PPO, as `oracles.evaluate` asks for them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from asyncrl.correction import Bounds, Correction, LossInputs, correct, weigh
from asyncrl.correction.aggregate import count
from asyncrl.correction.diagnostics import diagnose_update
from asyncrl.correction.losses import ppo
from asyncrl.correction.ratios import binary_kl, importance_ratio, kl_k1, kl_k2, kl_k3, masked_log_ratio
from asyncrl.correction.rules import Rule, geometric, kpop, outlier, vaco, veto
from asyncrl.correction.segments import Segments
from tests.parity.padded import Inputs, Padded


def _decoupled_tis(inputs: Inputs, dtype: torch.dtype) -> dict[str, Any]:
    case = Padded(inputs, dtype)
    mask, corrected = case.batch.loss_mask, correct(case.batch, Correction(truncate_high=inputs["cap"]))
    current = case.current()
    result = case.decoupled(current, corrected)
    loss = case.loss(result)
    loss.backward()
    plain = case.decoupled(current, weigh(case.batch, Correction(level="none")))
    update = diagnose_update(result.log_ratio, clipped=result.clipped, loss_mask=mask).result()
    return {"ratio": case.rows(torch.where(mask, importance_ratio(result.log_ratio), 0.0)), "weight": case.rows(corrected.weights),
            "clipped": case.rows(result.clipped), "per_token_loss": case.rows(result.losses), "loss": loss.item(),
            "grad_cur_logp": case.rows(current.grad), "loss_without_weight": case.loss(plain).item(),
            "clip_fraction": update["correction/clipped/frac"],
            "truncated_fraction": corrected.metrics.result()["correction/truncated/frac"]}


def _decoupled_mask(inputs: Inputs, dtype: torch.dtype) -> dict[str, Any]:
    case = Padded(inputs, dtype)
    corrected = correct(case.batch, Correction(mask_low=inputs["lower"], mask_high=inputs["upper"]))
    current = case.current()
    result = case.decoupled(current, corrected)
    loss = case.loss(result)
    loss.backward()
    offsets = case.batch.cu_seqlens
    return {"keep": case.rows(corrected.keep_mask), "weight": case.rows(corrected.weights),
            "n_original": count(case.batch.loss_mask, cu_seqlens=offsets).num_loss_tokens,
            "n_kept": count(corrected.keep_mask, cu_seqlens=offsets).num_loss_tokens, "loss_orig_denominator": loss.item(),
            "loss_kept_denominator": case.loss(result, mask=corrected.keep_mask).item(),
            "rejected_fraction": 1.0 - corrected.metrics.result()["correction/kept/frac"], "grad_cur_logp_orig": case.rows(current.grad)}


def _identity(inputs: Inputs, dtype: torch.dtype) -> dict[str, Any]:
    case = Padded(inputs, dtype)
    unweighted = LossInputs.of(case.batch, weigh(case.batch, Correction(level="none")))
    plain = ppo(case.current(), inputs=unweighted, clip_low=inputs["eps_low"], clip_high=inputs["eps_high"])
    first = case.current("prox_logp")
    case.loss(case.decoupled(first, weigh(case.batch, Correction(truncate_high=inputs["cap"])))).backward()
    return {"ppo_vs_behave_loss": case.loss(plain).item(), "first_minibatch_grad": case.rows(first.grad)}


def _overflow(inputs: Inputs, dtype: torch.dtype) -> dict[str, Any]:
    log_ratio = inputs["log_ratio"]
    case = Padded({"mask": [[1] * len(log_ratio)], "behave_logp": [[0.0] * len(log_ratio)], "prox_logp": [log_ratio]}, dtype)
    low, high = inputs["icepop"]
    corrections = {"truncated": Correction(truncate_high=inputs["cap"]), "icepop_weight": Correction(mask_low=low, mask_high=high),
                   "truncated_if_unclamped": Correction(truncate_high=inputs["cap"], log_clamp=40.0)}
    return {name: correct(case.batch, correction).weights.tolist() for name, correction in corrections.items()}


def _self_normalise(inputs: Inputs, dtype: torch.dtype) -> dict[str, Any]:
    case = Padded(inputs, dtype)
    cap, mask = inputs["cap"], case.batch.loss_mask
    weights = weigh(case.batch, Correction(truncate_high=cap)).weights
    normalised = weigh(case.batch, Correction(truncate_high=cap, normalize="token")).weights
    return {"raw_ratio": case.rows(weigh(case.batch, Correction()).weights), "weight": case.rows(weights),
            "mean_weight": weights[mask].mean().item(), "weight_normalised": case.rows(normalised),
            "normalised_mean": normalised[mask].mean().item()}


def _sequence_weights(inputs: Inputs, dtype: torch.dtype) -> dict[str, Any]:
    case = Padded(inputs, dtype)
    log_ratio, segments = _log_ratio(case), _sequences(case)

    def per_sequence(correction: Correction) -> list[float]:
        return _of_rows(case, weigh(case.batch, correction).weights)

    product, geometric_mean = ({"level": "sequence", "reduce": reduce} for reduce in ("sum", "mean"))
    return {"seq_sum_log_ratio": segments.sum(log_ratio).tolist(), "seq_mean_log_ratio": segments.mean(log_ratio).tolist(),
            "product_ratio": per_sequence(Correction(**product)), "geometric_ratio": per_sequence(Correction(**geometric_mean)),
            "product_weight": per_sequence(Correction(**product, truncate_high=inputs["cap"])),
            "geometric_weight": per_sequence(Correction(**geometric_mean, truncate_high=inputs["cap"])),
            "product_weight_seq_normalised": per_sequence(Correction(**product, truncate_high=inputs["cap"], normalize="sequence")),
            "product_weight_tokens": case.rows(weigh(case.batch, Correction(**product, truncate_high=inputs["cap"])).weights)}


def _estimators(inputs: Inputs, dtype: torch.dtype) -> dict[str, Any]:
    case = Padded(inputs, dtype)
    log_ratio, segments = _log_ratio(case), _sequences(case)
    tokens = {"k1": kl_k1(log_ratio), "k2": kl_k2(log_ratio), "k3": kl_k3(log_ratio), "areal_k3": kl_k3(-log_ratio)}
    mask = case.batch.loss_mask
    answers: dict[str, Any] = {f"token_{name}": case.rows(torch.where(mask, values, 0.0)) for name, values in tokens.items()}
    for name, values in tokens.items():
        largest = torch.where(segments.lengths > 0, segments.reduce(values, how="max"), 0.0)
        answers[name] = {"sum": segments.sum(values).tolist(), "mean": segments.mean(values).tolist(), "max": largest.tolist()}
    return answers


def _decisions(inputs: Inputs, dtype: torch.dtype) -> dict[str, Any]:
    case = Padded(inputs, dtype)

    def sequences(rule: Rule) -> list[bool]:
        return _kept_rows(case, rule)

    def tokens(rule: Rule) -> list[list[bool]]:
        return case.rows(_kept(case, rule))

    low, high = inputs["prod_lower"], inputs["prod_upper"]
    of_sum = {"level": "sequence", "reduce": "sum"}
    return {"keep_seq_geo": sequences(geometric(low=inputs["geo_lower"], high=inputs["geo_upper"])),
            "keep_seq_prod_documented": sequences(Bounds(statistic="ratio", **of_sum, low=low, high=high)),
            "verl_actual_seq_sum_k1": sequences(Bounds(statistic="k1", **of_sum, low=math.log(low), high=math.log(high))),
            "keep_seq_mean_k3": sequences(Bounds(statistic="k3", level="sequence", reduce="mean", high=inputs["seq_mean_k3_upper"])),
            "keep_seq_max_k2": sequences(Bounds(statistic="k2", level="sequence", reduce="max", high=inputs["seq_max_k2_upper"])),
            "keep_token_k3": tokens(Bounds(statistic="k3", high=inputs["token_k3_upper"])),
            "keep_token_ratio": tokens(Bounds(statistic="ratio", low=inputs["token_ratio_lower"], high=inputs["token_ratio_upper"]))}


def _veto(inputs: Inputs, dtype: torch.dtype) -> dict[str, Any]:
    zeros = torch.zeros_like(torch.tensor(inputs["mask"], dtype=torch.float64)).tolist()
    case = Padded({"mask": inputs["mask"], "behave_logp": zeros, "prox_logp": inputs["log_ratio"]}, dtype)
    rules = (veto(inputs["low"]), *((outlier(inputs["high"]),) if "high" in inputs else ()))
    return {"keep_seq": _kept_rows(case, *rules)}


def _kpop(inputs: Inputs, dtype: torch.dtype) -> dict[str, Any]:
    case = Padded(inputs, dtype)
    mask = case.batch.loss_mask
    rollout, proximal = (torch.where(mask, logprobs, 0.0) for logprobs in (case.batch.rollout_logprobs, case.batch.proximal_logprobs))
    forward, backward = binary_kl(proximal, other=rollout), binary_kl(rollout, other=proximal)
    return {"kl_prox_behave": case.rows(forward * mask), "kl_behave_prox": case.rows(backward * mask),
            "statistic": case.rows(torch.maximum(forward, backward) * mask), "keep": case.rows(_kept(case, kpop(inputs["upper"])))}


def _vaco(inputs: Inputs, dtype: torch.dtype) -> dict[str, Any]:
    case = Padded(inputs, dtype)
    gap = (importance_ratio(_log_ratio(case)) - 1.0).abs()
    return {"mean_abs_ratio_minus_1": _sequences(case).mean(gap).tolist(), "keep": case.rows(_kept(case, vaco(inputs["upper"])))}


def _seq_mask_tis(inputs: Inputs, dtype: torch.dtype) -> dict[str, Any]:
    case = Padded(inputs, dtype)
    rule = geometric(low=inputs["lower"], high=inputs["upper"])
    return {"keep_seq": _kept_rows(case, rule), "weight": case.rows(weigh(case.batch, Correction(reject=(rule,))).weights)}


def _turns(inputs: Inputs, dtype: torch.dtype) -> dict[str, Any]:
    case = Padded(inputs, dtype)
    low, high, cap = inputs["lower"], inputs["upper"], inputs["cap"]
    kept = weigh(case.batch, Correction(level="turn", reduce="mean", mask_low=low, mask_high=high)).keep_mask
    return {"turn_product": case.rows(weigh(case.batch, Correction(level="turn")).weights),
            "turn_geometric": case.rows(weigh(case.batch, Correction(level="turn", reduce="mean")).weights),
            "truncated_product": case.rows(weigh(case.batch, Correction(level="turn", truncate_high=cap)).weights),
            "keep_geometric": case.rows(kept)}


def _log_ratio(case: Padded) -> Tensor:
    return masked_log_ratio(case.batch.proximal_logprobs, sampled_logprobs=case.batch.rollout_logprobs, mask=case.batch.loss_mask)


def _sequences(case: Padded) -> Segments:
    return Segments.of_sequences(case.batch.loss_mask, cu_seqlens=case.batch.cu_seqlens)


def _kept(case: Padded, *rules: Rule) -> Tensor:
    return weigh(case.batch, Correction(level="none", reject=rules)).keep_mask


def _kept_rows(case: Padded, *rules: Rule) -> list[bool]:
    """Of each sequence; a rule over sequences keeps what has no loss token to reject."""
    rejected = case.batch.loss_mask & ~_kept(case, *rules)
    return (~rejected.reshape(case.shape).any(1)).tolist()


def _of_rows(case: Padded, weights: Tensor) -> list[float]:
    """The one weight of each sequence, 0 of one without loss tokens."""
    return weights.reshape(case.shape).amax(1).tolist()


CASES = {"decoupled_ppo_token_tis": _decoupled_tis, "decoupled_ppo_token_mask_denominators": _decoupled_mask,
         "identity_prox_equals_behave": _identity, "numerics_overflow": _overflow,
         "tis_token_truncate_and_self_normalise": _self_normalise, "tis_sequence_product_and_geometric": _sequence_weights,
         "rs_estimators_token_and_sequence": _estimators, "rs_decisions": _decisions, "veto_catastrophic_token": _veto,
         "kpop_binary_kl": _kpop, "vaco_tv_filter": _vaco, "seq_mask_tis": _seq_mask_tis, "turn_level_weights": _turns}
