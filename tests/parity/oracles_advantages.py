"""Advantages, aggregation and ESS control, as `oracles.evaluate` asks for them: each kind of case through the public API."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.correction.advantages import dr_grpo, grpo, maxrl, opo, rloo
from asyncrl.correction.aggregate import Denominators, Mode, aggregate, count, scale
from asyncrl.correction.ess_control import EssSums, learning_rate_scale
from asyncrl.correction.overlong import overlong_penalty
from asyncrl.correction.token_advantages import gae, reinforce_plus_plus, returns_to_go
from asyncrl.correction.whitening import whiten

Inputs = Mapping[str, Any]
Answers = dict[str, Any]
Share = tuple[Tensor, Tensor, Tensor]
"""Losses [T], loss mask [T] and offsets [N + 1] of one microbatch."""


def _array(values: Any, dtype: torch.dtype) -> NDArray[Any]:
    """As a caller who has it in that precision hands it over."""
    return np.asarray(values, np.float32 if dtype == torch.float32 else np.float64)


def _mask(values: Any) -> NDArray[np.bool_]:
    return np.asarray(values) > 0


def _advantages(inputs: Inputs, dtype: torch.dtype) -> Answers:
    def of(values: list[float]) -> dict[str, list[float]]:
        rewards, ids = _array(values, dtype), inputs["group"]
        return {"grpo_unbiased": grpo(rewards, group_ids=ids).tolist(), "dr_grpo": dr_grpo(rewards, group_ids=ids).tolist(),
                "grpo_biased": grpo(rewards, group_ids=ids, unbiased_std=False).tolist(), "rloo": rloo(rewards, group_ids=ids).tolist(),
                "maxrl": maxrl(rewards, group_ids=ids).tolist()}

    return {name.removeprefix("rewards_"): of(values) for name, values in inputs.items() if name.startswith("rewards_")}


def _opo(inputs: Inputs, dtype: torch.dtype) -> Answers:
    """One group; its baseline is what each reward has more than its advantage."""
    rewards = _array(inputs["rewards"], dtype)
    advantages = opo(rewards, group_ids=np.zeros(len(rewards), int), lengths=_array(inputs["lengths"], dtype))
    return {"baseline": float(rewards[0] - advantages[0]), "adv": advantages.tolist()}


def _gae(inputs: Inputs, dtype: torch.dtype) -> Answers:
    mask = _mask(inputs["mask"])
    packed = {"rewards": _array(inputs["rewards"], dtype), "values": _array(inputs["values"], dtype), "loss_mask": mask,
              "cu_seqlens": [0, len(mask)], "gamma": inputs["gamma"], "lam": inputs["lam"]}
    skipping = gae(**packed)
    return {"adv_skip": skipping.advantages.tolist(), "returns_skip": skipping.returns.tolist(),
            "adv_no_skip": gae(**packed, skip_masked=False).advantages.tolist(),
            "adv_skip_whitened": whiten(skipping.advantages, counts=mask).tolist()}


def _reinforce_plus_plus(inputs: Inputs, dtype: torch.dtype) -> Answers:
    mask = _mask(inputs["mask"])
    rewards, bounds = _array(inputs["token_rewards"], dtype).ravel(), np.arange(len(mask) + 1) * mask.shape[1]
    packed = {"loss_mask": mask.ravel(), "cu_seqlens": bounds, "gamma": inputs["gamma"]}
    return {"returns": returns_to_go(rewards, **packed).reshape(mask.shape).tolist(),
            "adv": reinforce_plus_plus(rewards, **packed).reshape(mask.shape).tolist()}


def _aggregation(inputs: Inputs, dtype: torch.dtype) -> Answers:
    ranks = [[_packed(sequences, dtype) for sequences in microbatches] for microbatches in inputs["losses"].values()]
    pieces = [piece for rank in ranks for piece in rank]
    counts = [[count(mask, cu_seqlens=offsets) for _, mask, offsets in rank] for rank in ranks]
    whole = sum((share for rank in counts for share in rank), Denominators(0, 0))

    def total(shares: list[Share], denominators: Denominators, mode: Mode = "token_mean") -> float:
        constant = inputs["l_max"] if mode == "dr_grpo" else None
        return sum(aggregate(losses, loss_mask=mask, cu_seqlens=offsets, denominators=denominators, mode=mode,
                             max_tokens=constant).item() for losses, mask, offsets in shares)

    of_microbatches = [total([piece], own) for rank, owns in zip(ranks, counts, strict=True) for piece, own in zip(rank, owns, strict=True)]
    of_ranks = [total(rank, sum(owns, Denominators(0, 0))) for rank, owns in zip(ranks, counts, strict=True)]
    factor = scale(whole, averaging_ranks=inputs["dp"])
    modes: dict[str, Mode] = {"token-mean": "token_mean", "token-sum": "token_sum", "seq-mean-token-sum": "seq_mean_token_sum",
                              "seq-mean-token-mean": "seq_mean_token_mean", "dr-grpo": "dr_grpo"}
    return {name: total(pieces, whole, mode) for name, mode in modes.items()} | {
        "n_tokens": whole.num_loss_tokens, "n_seqs": whole.num_loss_sequences,
        "naive_mean_of_microbatch_token_means": sum(of_microbatches) / len(of_microbatches),
        "naive_mean_of_rank_token_means": sum(of_ranks) / len(of_ranks),
        "microbatch_backward_values_token_mean": [[losses.sum().item() * factor for losses, _, _ in rank] for rank in ranks]}


def _packed(sequences: list[list[float]], dtype: torch.dtype) -> Share:
    losses = torch.tensor([loss for sequence in sequences for loss in sequence], dtype=dtype)
    lengths = torch.tensor([0, *(len(sequence) for sequence in sequences)])
    return losses, torch.ones(len(losses), dtype=torch.bool), lengths.cumsum(0)


def _vcpo(inputs: Inputs, dtype: torch.dtype) -> Answers:
    sums, base = EssSums.of(torch.tensor(inputs["seq_weights"], dtype=dtype)), inputs["base_ess_ratio"]
    return {"ess": sums.ess, "ess_ratio": sums.ess_frac, "lr_scale_sqrt": learning_rate_scale(sums, base_ess_frac=base),
            "lr_scale_linear": learning_rate_scale(sums, base_ess_frac=base, rule="linear")}


def _overlong(inputs: Inputs, dtype: torch.dtype) -> Answers:
    lengths, limits = _array(inputs["lengths"], dtype), {"max_tokens": inputs["l_max"], "cache_tokens": inputs["l_cache"]}
    return {"penalty_paper": overlong_penalty(lengths, **limits).tolist(),
            "penalty_unclamped": overlong_penalty(lengths, **limits, unclamped=True).tolist()}


CASES: dict[str, Callable[[Inputs, torch.dtype], Answers]] = {
    "advantages_group": _advantages, "advantage_opo_length_weighted": _opo, "gae_skip_observation_tokens": _gae,
    "reinforce_plus_plus": _reinforce_plus_plus, "aggregation_across_microbatches_and_ranks": _aggregation,
    "vcpo_ess_step_scaling": _vcpo, "dapo_overlong_shaping": _overlong}
