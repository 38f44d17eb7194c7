"""Policy losses and the KL to a reference, as `oracles.evaluate` asks for them: each kind of case through the public API.

A row without loss tokens has ratio 1, loss 0 and no part in its group; means over sequences leave it out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from asyncrl.correction import Correction, CorrectionBatch, LossInputs, PolicyLoss, SecondMoment, weigh
from asyncrl.correction import catalog as losses
from asyncrl.correction.aggregate import Mode, aggregate, count
from asyncrl.correction.clip import clip_range
from asyncrl.correction.losses import decoupled_ppo, importance_sampling
from asyncrl.correction.proximal import linear_in_probability, log_linear, log_linear_alpha
from asyncrl.correction.ratios import binary_kl, importance_ratio, kl_k1, masked_log_ratio, pushes_away
from asyncrl.correction.reference_kl import reference_kl
from asyncrl.correction.rules import opsm
from asyncrl.correction.second_moment import second_moment_tau
from asyncrl.correction.segments import Segments
from asyncrl.correction.sequence_losses import gmpo, gspo

Inputs = Mapping[str, Any]
Answers = dict[str, Any]
NEVER_CLIPPED = {"clip_low": 1.0, "clip_high": 1e12}


class _Case:
    """The inputs of a case, padded [N, L] or one row, as one packed batch whose sequences are all L long."""

    def __init__(self, inputs: Inputs, dtype: torch.dtype, *, current: str = "cur_logp", rollout: str = "behave_logp",
                 proximal: str = "prox_logp") -> None:
        self.inputs, self.dtype = inputs, dtype
        self.shape = torch.tensor(inputs[current]).shape
        self.current = self.flat(current).requires_grad_()
        mask = torch.tensor(inputs["mask"]).flatten() > 0 if "mask" in inputs else torch.ones(len(self.current), dtype=torch.bool)
        rollout_logprobs = self.flat(rollout)
        rows = self.shape[0] if len(self.shape) == 2 else 1
        self.batch = CorrectionBatch(
            rollout_logprobs=rollout_logprobs, proximal_logprobs=self.flat(proximal) if proximal in inputs else rollout_logprobs,
            advantages=self.advantages(), loss_mask=mask, turn_ids=torch.zeros(len(mask), dtype=torch.int16),
            policy_versions=torch.zeros(len(mask), dtype=torch.int32), cu_seqlens=torch.arange(rows + 1) * self.shape[-1],
            group_ids=torch.tensor(inputs.get("group", [0] * rows)), version=0)
        self.mask = mask
        self.sequences = Segments.of_sequences(mask, cu_seqlens=self.batch.cu_seqlens)

    def flat(self, name: str) -> Tensor:
        return torch.tensor(self.inputs[name], dtype=self.dtype).flatten()

    def advantages(self) -> Tensor:
        """Of the tokens, or those of the sequences at each of their tokens; −1 where the case has none: the loss is then its weight."""
        if "adv" in self.inputs:
            return self.flat("adv")
        if "adv_seq" in self.inputs:
            return self.flat("adv_seq").repeat_interleave(self.shape[-1])
        return torch.full((len(self.current),), -1.0, dtype=self.dtype)

    def loss_inputs(self, *, advantages: Tensor | None = None) -> LossInputs:
        """Of weight 1, nothing dropped."""
        batch = self.batch if advantages is None else replace(self.batch, advantages=advantages)
        return LossInputs.of(batch, weigh(batch, Correction(level="none")))

    def signs(self) -> LossInputs:
        """Advantages of 1 where the case has positive ones, else −1: a loss is then its weight, up to that sign."""
        return self.loss_inputs(advantages=self.sign)

    @property
    def sign(self) -> Tensor:
        return torch.where(self.batch.advantages > 0, 1.0, -1.0).to(self.dtype)

    def log_ratio(self, anchor: Tensor) -> Tensor:
        return masked_log_ratio(self.current.detach(), sampled_logprobs=anchor, mask=self.mask)

    def total(self, result: PolicyLoss, mode: Mode = "token_mean") -> Tensor:
        offsets = self.batch.cu_seqlens
        return aggregate(result.losses, loss_mask=self.mask, cu_seqlens=offsets, mode=mode,
                         denominators=count(self.mask, cu_seqlens=offsets))

    def gradient(self, loss: Tensor) -> list[Any]:
        return self.rows(torch.autograd.grad(loss, self.current)[0])

    def rows(self, packed: Tensor) -> list[Any]:
        """As the case has them; 0 or False under the mask."""
        return torch.where(self.mask, packed.detach(), torch.zeros_like(packed)).reshape(self.shape).tolist()

    def by_sequence(self, packed: Tensor, *, empty: float = 0.0) -> list[float]:
        return torch.where(self.sequences.lengths > 0, self.sequences.mean(packed.detach()), empty).tolist()


def _of_ratios(inputs: Inputs, dtype: torch.dtype) -> _Case:
    """A case that gives ratios instead of logprobs."""
    ratio = torch.tensor(inputs["ratio"], dtype=torch.float64)
    logprobs = ratio.log()
    return _Case({"cur_logp": logprobs.tolist(), "behave_logp": torch.zeros_like(ratio).tolist()} | dict(inputs), dtype)


def _dual_clip(inputs: Inputs, dtype: torch.dtype) -> Answers:
    case = _of_ratios(inputs, dtype)
    clip = {"clip_low": inputs["eps_low"], "clip_high": inputs["eps_high"]}
    result = decoupled_ppo(case.current, inputs=case.loss_inputs(), dual_clip=inputs["c"], **clip)
    plain = decoupled_ppo(case.current, inputs=case.loss_inputs(), **clip)
    return {"per_token_loss": case.rows(result.losses), "grad": case.gradient(result.losses.sum()), "clipped": case.rows(plain.clipped),
            "dual_clipped": case.rows(result.losses != plain.losses)}


def _gspo(inputs: Inputs, dtype: torch.dtype) -> Answers:
    case = _Case(inputs, dtype)
    result = gspo(case.current, inputs=case.loss_inputs(), clip_low=inputs["eps_low"], clip_high=inputs["eps_high"])
    loss = case.total(result, "seq_mean_token_mean")
    ratio = importance_ratio(case.sequences.mean(case.log_ratio(case.batch.proximal_logprobs)))
    return {"seq_ratio": ratio.tolist(), "per_seq_loss": case.by_sequence(result.losses),
            "unclipped": [clipped == 0 for clipped in case.by_sequence(result.clipped)], "loss": loss.item(),
            "grad_cur_logp": case.gradient(loss)}


def _cispo(inputs: Inputs, dtype: torch.dtype) -> Answers:
    case = _Case(inputs, dtype)
    if "eps_high_relative" in inputs:
        loss, settings = losses.cispo, {"clip_high": inputs["eps_high_relative"]}
    else:
        loss, settings = losses.cispo_absolute, {"cap": inputs["absolute_cap"]}
    total = case.total(loss(case.current, inputs=case.loss_inputs(), **settings))
    ones = case.loss_inputs(advantages=torch.full_like(case.sign, -1.0))
    return {"weight": case.gradient(loss(case.current, inputs=ones, **settings).losses.sum()), "loss": total.item(),
            "grad_cur_logp": case.gradient(total)}


def _sapo(inputs: Inputs, dtype: torch.dtype) -> Answers:
    case = _Case(inputs, dtype)
    settings = {"temperature_positive": inputs["tau_pos"], "temperature_negative": inputs["tau_neg"]}
    loss = case.total(losses.sapo(case.current, inputs=case.loss_inputs(), **settings))
    gate = losses.sapo(case.current, inputs=case.signs(), **settings).losses * -case.sign
    return {"gate": case.rows(gate), "loss": loss.item(), "grad_cur_logp": case.gradient(loss)}


def _dppo(inputs: Inputs, dtype: torch.dtype) -> Answers:
    case = _Case(inputs, dtype)
    tv = losses.dppo_tv(case.current, inputs=case.loss_inputs(), low=inputs["delta_tv"], high=inputs["delta_tv"], cap=inputs["c"])
    kl = losses.dppo_kl(case.current, inputs=case.loss_inputs(), limit=inputs["delta_kl"], cap=inputs["c"])
    current, rollout = (torch.where(case.mask, logprobs, 0.0) for logprobs in (case.current.detach(), case.batch.rollout_logprobs))
    loss = case.total(tv)
    return {"prob_diff": case.rows(current.exp() - rollout.exp()), "binary_kl_behave_cur": case.rows(binary_kl(rollout, other=current)),
            "keep_tv": case.rows(~tv.clipped), "keep_kl": case.rows(~kl.clipped), "loss_tv": loss.item(),
            "loss_kl": case.total(kl).item(), "grad_cur_logp_tv": case.gradient(loss)}


def _prime_rl(inputs: Inputs, dtype: torch.dtype) -> Answers:
    case = _Case(inputs, dtype)
    default = losses.prime_rl_dppo(case.current, inputs=case.loss_inputs(), low=inputs["mask_low"], high=inputs["mask_high"],
                                   kl_tau=inputs["kl_tau"])
    ipo = losses.prime_rl_ipo(case.current, inputs=case.loss_inputs(), threshold=inputs["ipo_threshold"], kl_tau=inputs["kl_tau"])
    loss, whole = case.total(default), case.total(default, "token_sum")
    return {"keep_default": case.rows(~default.clipped), "loss_default": loss.item(), "loss_default_sum": whole.item(),
            "grad_cur_logp": case.gradient(loss), "keep_ipo": case.rows(~ipo.clipped), "loss_ipo": case.total(ipo).item()}


def _vespo(inputs: Inputs, dtype: torch.dtype) -> Answers:
    """The kernel of a sequence is that of one token with the same log-ratio."""
    case = _Case(inputs, dtype, current="num_logp", rollout="den_logp")
    whole = case.sequences.sum(case.log_ratio(case.batch.rollout_logprobs))
    sign = [1.0 if advantage >= 0 else -1.0 for advantage in inputs["adv_seq"]]
    alone = _Case({"cur_logp": [[value] for value in whole.tolist()], "behave_logp": [[0.0]] * len(sign), "adv_seq": sign}, dtype)
    scores = alone.gradient(losses.vespo(alone.current, inputs=alone.loss_inputs()).losses.sum())
    return {"seq_log_ratio": whole.tolist(), "phi": [-one * score for one, (score,) in zip(sign, scores, strict=True)]}


def _opsm(inputs: Inputs, dtype: torch.dtype) -> Answers:
    case = _Case(inputs, dtype, proximal="cur_logp")
    kept = weigh(case.batch, Correction(level="none", reject=(opsm(inputs["delta"]),))).keep_mask
    mean_kl = case.sequences.mean(kl_k1(case.log_ratio(case.batch.rollout_logprobs)))
    return {"mean_kl": mean_kl.tolist(), "keep_seq": [share > 0 for share in case.by_sequence(kept, empty=1.0)]}


def _gepo(inputs: Inputs, dtype: torch.dtype) -> Answers:
    case = _Case(inputs, dtype)
    batch = case.batch
    expectation = losses.log_group_expectation(batch.rollout_logprobs, mask=case.mask, cu_seqlens=batch.cu_seqlens,
                                               group_ids=batch.group_ids)
    result = losses.gepo(case.current, inputs=case.loss_inputs(advantages=torch.full_like(case.sign, -1.0)),
                         group_expectation=expectation, **NEVER_CLIPPED)
    ratio = case.sequences.mean(case.log_ratio(batch.rollout_logprobs)).exp()
    means = [case.sequences.mean(logprobs).exp().tolist() for logprobs in (case.current.detach(), batch.rollout_logprobs)]
    return {"p": means[0], "q": means[1], "group_expectation": expectation[case.mask][0].exp().item(),
            "weight": case.by_sequence(result.losses), "plain_ratio": ratio.tolist()}


def _aspo(inputs: Inputs, dtype: torch.dtype) -> Answers:
    case = _of_ratios(inputs, dtype)
    result = losses.aspo(case.current, inputs=case.loss_inputs(), clip_low=inputs["eps_low"], clip_high=inputs["eps_high"],
                         cap_positive=inputs["c_pos"], cap_negative=inputs["c_neg"])
    return {"grad": case.gradient(result.losses.sum())}


def _reference_kl(inputs: Inputs, dtype: torch.dtype) -> Answers:
    case = _Case(inputs, dtype)
    frozen = {"ref_logprobs": case.flat("ref_logp"), "inputs": case.loss_inputs(), "coefficient": 1.0}
    terms = {name: reference_kl(case.current, estimator=name, **frozen) for name in ("k2", "k3_forward", "k3_importance")}
    values = {name: case.rows(term) for name, term in terms.items()}
    grads = {name: case.gradient(term.sum()) for name, term in terms.items()}
    return {"k1": case.rows(kl_k1(-case.log_ratio(case.flat("ref_logp")))), "k2": values["k2"], "k3": values["k3_forward"],
            "grad_k2": grads["k2"], "grad_k3": grads["k3_forward"], "unbiased_loss": values["k3_importance"],
            "unbiased_grad": grads["k3_importance"]}


def _gmpo(inputs: Inputs, dtype: torch.dtype) -> Answers:
    case = _Case(inputs, dtype)
    clip = {"log_clip_low": inputs["eps"], "log_clip_high": inputs["eps"]}
    loss = case.total(gmpo(case.current, inputs=case.loss_inputs(), **clip), "seq_mean_token_mean")
    ratio = gmpo(case.current, inputs=case.signs(), **clip).losses * -case.sign
    return {"seq_ratio": case.by_sequence(ratio, empty=1.0), "loss": loss.item()}


def _tinker(inputs: Inputs, dtype: torch.dtype) -> Answers:
    case = _Case(inputs, dtype)
    gain = case.total(importance_sampling(case.current, inputs=case.loss_inputs()), "token_sum")
    dro = case.total(losses.dro(case.current, inputs=case.loss_inputs(), beta=inputs["beta"]), "token_sum")
    return {"importance_sampling": gain.item(), "dro": dro.item(), "dro_grad": case.gradient(dro)}


def _m2po(inputs: Inputs, dtype: torch.dtype) -> Answers:
    """The mask looks at the proximal policy, the clip at the current one."""
    case, limit = _Case(inputs, dtype), inputs["threshold"]
    kept = weigh(case.batch, Correction(level="none", reject=(SecondMoment(limit=limit),))).keep_mask
    before = masked_log_ratio(case.batch.proximal_logprobs, sampled_logprobs=case.batch.rollout_logprobs, mask=case.mask).square()
    now, advantages = case.log_ratio(case.batch.rollout_logprobs), case.batch.advantages
    away = pushes_away(now, advantages=advantages, mask=case.mask)
    exact, authors = (second_moment_tau(now, advantages=advantages, mask=case.mask, limit=limit, exact=exact).item()
                      for exact in (True, False))
    low, high, _ = clip_range(*losses.M2PO_MINIMUM_CLIP)
    return {"second_moment_all": before[case.mask].mean().item(), "keep_mask_form": case.rows(kept),
            "kept_second_moment": before[kept].mean().item(), "harmful": case.rows(away),
            "harmful_mean_d2": now[away].square().mean().item(), "tau_exact": exact, "clip_low_exact": math.exp(-exact),
            "clip_high_exact": math.exp(exact), "tau_reference_code": authors,
            "clip_reference_after_miniclip": [min(low, math.exp(-authors)), max(high, math.exp(authors))]}


def _log_linear(inputs: Inputs, dtype: torch.dtype) -> Answers:
    case = _Case(inputs, dtype)
    rollout, current = case.batch.rollout_logprobs, case.current.detach()
    alpha = log_linear_alpha(torch.tensor(inputs["token_version"]), proximal_version=inputs["version_prox"],
                             current_version=inputs["version_theta"]).to(dtype)
    guess = log_linear(current, rollout_logprobs=rollout, alpha=alpha, loss_mask=case.mask, correction=Correction(proximal="log_linear"))
    frozen = replace(case.loss_inputs(advantages=torch.ones_like(rollout)), proximal_logprobs=guess.logprobs, weights=guess.weights)
    result = decoupled_ppo(case.current, inputs=frozen, **NEVER_CLIPPED)
    return {"alpha": alpha.tolist(), "prox_loglinear": guess.logprobs.tolist(),
            "prox_linear_prob": linear_in_probability(current, rollout_logprobs=rollout, alpha=alpha).tolist(),
            "behave_weight_loglinear": guess.weights.tolist(), "trust_ratio_loglinear": importance_ratio(result.log_ratio).tolist(),
            "grad_cur_unclipped_adv1": case.gradient(result.losses.sum())}


CASES: dict[str, Callable[[Inputs, torch.dtype], Answers]] = {
    "dual_clip_and_clip_higher": _dual_clip, "gspo_value_and_grad": _gspo, "cispo_value_and_grad": _cispo, "sapo_soft_gate": _sapo,
    "dppo_binary_tv_and_kl": _dppo, "prime_rl_default_and_ipo": _prime_rl, "vespo_gamma_weight": _vespo, "opsm_sequence_mask": _opsm,
    "gepo_group_expectation_ratio": _gepo, "aspo_flipped_ratio_gradient": _aspo, "kl_to_reference_estimators": _reference_kl,
    "gmpo_geometric_mean": _gmpo, "tinker_importance_sampling_dro": _tinker, "m2po_second_moment": _m2po,
    "prox_loglinear_by_version": _log_linear}
