"""Answers numerical cases through the public API of `asyncrl.correction`.

A case has padded inputs [N, L] with anything under the mask, and expected values by name. `evaluate` returns those names.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from asyncrl.correction import Corrected, Correction, CorrectionBatch, LossInputs, PolicyLoss, correct, weigh
from asyncrl.correction.aggregate import Mode, aggregate, count
from asyncrl.correction.diagnostics import diagnose_update, quantiles
from asyncrl.correction.losses import decoupled_ppo, ppo
from asyncrl.correction.ratios import importance_ratio, masked_log_ratio

Inputs = Mapping[str, Any]


def evaluate(name: str, inputs: Inputs, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """What the library says about a case, under the case's own names. Raises KeyError for a kind it does not cover."""
    kinds: dict[str, Callable[[Inputs, torch.dtype], dict[str, Any]]] = {
        "decoupled_ppo_token_tis": _decoupled_tis, "decoupled_ppo_token_mask_denominators": _decoupled_mask,
        "identity_prox_equals_behave": _identity, "numerics_overflow": _overflow, "metrics_offpolicy": _metrics,
        **_beside("oracles_advantages").CASES}
    return kinds[name](inputs, dtype)


def _beside(name: str) -> ModuleType:
    """A module of this folder, however this one was loaded."""
    spec = importlib.util.spec_from_file_location(f"parity_{name}", Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Padded:
    """A padded case as a packed batch whose rows are all L long."""

    def __init__(self, inputs: Inputs, dtype: torch.dtype) -> None:
        mask = torch.tensor(inputs["mask"], dtype=torch.float64) > 0
        self.inputs, self.dtype, self.shape = inputs, dtype, mask.shape
        sequences, length = mask.shape
        flat = mask.flatten()
        advantages = self.flat("adv") if "adv" in inputs else torch.zeros(len(flat), dtype=dtype)
        self.batch = CorrectionBatch(
            rollout_logprobs=self.flat("behave_logp"), proximal_logprobs=self.flat("prox_logp"), advantages=advantages, loss_mask=flat,
            turn_ids=torch.zeros(len(flat), dtype=torch.int16), policy_versions=torch.zeros(len(flat), dtype=torch.int32),
            cu_seqlens=torch.arange(sequences + 1) * length, group_ids=torch.arange(sequences), version=0)

    def flat(self, name: str) -> Tensor:
        return torch.tensor(self.inputs[name], dtype=self.dtype).flatten()

    def current(self, name: str = "cur_logp") -> Tensor:
        return self.flat(name).requires_grad_()

    def rows(self, packed: Tensor) -> list[list[Any]]:
        return packed.detach().reshape(self.shape).tolist()

    def loss(self, result: PolicyLoss, *, mask: Tensor | None = None) -> Tensor:
        """Token mean (or the case's aggregation) over the tokens of `mask`, by default the loss mask."""
        counted = self.batch.loss_mask if mask is None else mask
        offsets, mode = self.batch.cu_seqlens, _mode(self.inputs.get("aggregation", "token-mean"))
        return aggregate(result.losses, loss_mask=self.batch.loss_mask, cu_seqlens=offsets, denominators=count(counted, cu_seqlens=offsets),
                         mode=mode)

    def decoupled(self, current: Tensor, corrected: Corrected) -> PolicyLoss:
        return decoupled_ppo(current, inputs=LossInputs.of(self.batch, corrected), clip_low=self.inputs["eps_low"],
                             clip_high=self.inputs["eps_high"])


def _mode(name: str) -> Mode:
    return name.replace("-", "_")  # type: ignore[return-value]


def _decoupled_tis(inputs: Inputs, dtype: torch.dtype) -> dict[str, Any]:
    case = _Padded(inputs, dtype)
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
    case = _Padded(inputs, dtype)
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
    case = _Padded(inputs, dtype)
    unweighted = LossInputs.of(case.batch, weigh(case.batch, Correction(level="none")))
    plain = ppo(case.current(), inputs=unweighted, clip_low=inputs["eps_low"], clip_high=inputs["eps_high"])
    first = case.current("prox_logp")
    case.loss(case.decoupled(first, weigh(case.batch, Correction(truncate_high=inputs["cap"])))).backward()
    return {"ppo_vs_behave_loss": case.loss(plain).item(), "first_minibatch_grad": case.rows(first.grad)}


def _overflow(inputs: Inputs, dtype: torch.dtype) -> dict[str, Any]:
    log_ratio = inputs["log_ratio"]
    case = _Padded({"mask": [[1] * len(log_ratio)], "behave_logp": [[0.0] * len(log_ratio)], "prox_logp": [log_ratio]}, dtype)
    low, high = inputs["icepop"]
    corrections = {"truncated": Correction(truncate_high=inputs["cap"]), "icepop_weight": Correction(mask_low=low, mask_high=high),
                   "truncated_if_unclamped": Correction(truncate_high=inputs["cap"], log_clamp=40.0)}
    return {name: correct(case.batch, correction).weights.tolist() for name, correction in corrections.items()}


def _metrics(inputs: Inputs, dtype: torch.dtype) -> dict[str, Any]:
    case = _Padded(inputs, dtype)
    correction = Correction(truncate_high=inputs["cap"])
    got = correct(case.batch, correction).metrics.result()
    names = {"kl": "kl_k1/mean", "k3_kl": "kl_k3/mean", "chi2_token": "chi2/mean", "chi2_seq": "chi2_sequence/mean",
             "ess_fraction_raw": "ess_raw/frac", "ess_fraction_capped": "ess/frac", "logp_abs_diff_mean": "logprob_gap/mean",
             "logp_abs_diff_max": "logprob_gap/max", "prob_abs_diff_mean": "prob_gap/mean", "prob_abs_diff_max": "prob_gap/max",
             "prob_abs_diff_std": "prob_gap/std", "pearson_prob": "prob_pearson/value", "log_ppl_diff_mean": "log_ppl_gap/mean",
             "token_mult_prob_error": "mult_prob_error/mean"}
    rows = [_Padded({name: [inputs[name][n]] for name in ("mask", "behave_logp", "prox_logp")}, dtype) for n in range(case.shape[0])]
    alone = [correct(row.batch, correction).metrics.result() for row in rows if row.batch.loss_mask.any()]
    mask = case.batch.loss_mask
    log_ratio = masked_log_ratio(case.batch.proximal_logprobs, sampled_logprobs=case.batch.rollout_logprobs, mask=mask)
    levels = (0.05, 0.5, 0.95)
    found = quantiles(importance_ratio(log_ratio[mask]), levels=levels).tolist()
    return {name: got[f"correction/{metric}"] for name, metric in names.items()} | {
        "rollout_log_ppl": [row["correction/rollout_log_ppl/mean"] for row in alone],
        "training_log_ppl": [row["correction/proximal_log_ppl/mean"] for row in alone],
        "ratio_quantiles": {f"{level}": value for level, value in zip(levels, found, strict=True)}}
