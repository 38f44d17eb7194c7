"""verl's rollout correction, policy losses, advantages and metrics, called by name. Runs in verl's environment; arrays are padded [N, L].

A setting has verl's own name wherever verl has one.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo.core_algos import agg_loss, get_adv_estimator_fn, get_policy_loss_fn, kl_penalty
from verl.trainer.ppo.rollout_corr_helper import compute_offpolicy_metrics, compute_rollout_correction_and_rejection_mask
from verl.workers.config import ActorConfig, PolicyLossConfig

sys.path.insert(0, str(Path(__file__).parent))

from adapter import Settings, Tensors, serve, with_gradient

NO_DUAL_CLIP = 1e9


def corrected(tensors: Tensors, settings: Settings) -> tuple[torch.Tensor | None, torch.Tensor, dict[str, float]]:
    """Weights if there are any, the mask that is left, and what verl logs."""
    proto, mask, metrics = compute_rollout_correction_and_rejection_mask(
        old_log_prob=tensors["proximal_logprobs"], rollout_log_prob=tensors["rollout_logprobs"],
        response_mask=tensors["loss_mask"].long(), **settings)
    return (None if proto is None else proto.batch["rollout_is_weights"]), mask, metrics


def correction(tensors: Tensors, settings: Settings) -> dict[str, torch.Tensor]:
    """`weights`, `keep_mask` and `metrics/NAME`."""
    weights, mask, metrics = corrected(tensors, settings)
    found = {"keep_mask": mask, **logged(metrics)}
    return found if weights is None else {**found, "weights": weights}


def actor_config(settings: Settings, *, mask: torch.Tensor, correction: RolloutCorrectionConfig | None = None) -> ActorConfig:
    """`actor` are fields of ActorConfig, `policy_loss` of PolicyLossConfig. Counts the tokens of `mask`, as verl's engines do."""
    extra = {} if correction is None else {"rollout_correction": correction}
    counts = {"dp_size": 1, "batch_num_tokens": int(mask.sum()), "global_batch_size": len(mask)}
    return ActorConfig(strategy="fsdp", rollout_n=8, use_dynamic_bsz=True, global_batch_info=counts, policy_loss=PolicyLossConfig(
        **settings.get("policy_loss", {}), **extra), **{"clip_ratio_c": NO_DUAL_CLIP, **settings.get("actor", {})})


def loss(tensors: Tensors, settings: Settings) -> dict[str, torch.Tensor]:
    """A policy loss by `mode` with its gradient, after `correction` where one is given; what it leaves is the denominator, as in verl."""
    weights, mask = None, tensors["loss_mask"].long()
    if "correction" in settings:
        weights, mask, _ = corrected(tensors, settings["correction"])
    return policy_loss(tensors, settings, config=actor_config(settings, mask=mask), weights=weights, mask=mask)


def policy_loss(tensors: Tensors, settings: Settings, *, config: ActorConfig, weights: torch.Tensor | None,
                mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Loss, gradient and what verl logs."""
    metrics: dict[str, Any] = {}
    anchor = tensors["rollout_logprobs" if settings["mode"] == "bypass_mode" else "proximal_logprobs"]

    def value(logprobs: torch.Tensor) -> torch.Tensor:
        result, logged_metrics = get_policy_loss_fn(settings["mode"])(
            old_log_prob=anchor, log_prob=logprobs, advantages=tensors["advantages"], response_mask=mask,
            loss_agg_mode=settings.get("loss_agg_mode", "token-mean"), config=config, rollout_is_weights=weights)
        metrics.update(logged_metrics)
        return result

    return {**with_gradient(tensors["logprobs"], value), **logged(metrics)}


def preset(tensors: Tensors, settings: Settings) -> dict[str, torch.Tensor]:
    """Loss and gradient of one of verl's named corrections, `name`, with the loss that verl would use with it."""
    named = getattr(RolloutCorrectionConfig, settings["name"])()
    if named.bypass_mode:
        mask = tensors["loss_mask"].long()
        config = actor_config(settings, mask=mask, correction=named)
        return policy_loss(tensors, {**settings, "mode": "bypass_mode"}, config=config, weights=None, mask=mask)
    fields = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs", "rollout_rs_threshold")
    weights, mask, _ = corrected(tensors, {name: getattr(named, name) for name in fields})
    config = actor_config(settings, mask=mask)
    return policy_loss(tensors, {**settings, "mode": "vanilla"}, config=config, weights=weights, mask=mask)


def advantages(tensors: Tensors, settings: Settings) -> dict[str, torch.Tensor]:
    """[N, L] of an `estimator`; the reward of a sequence stands at its last token. `gamma` and `lam` for those that have them."""
    mask, estimator = tensors["loss_mask"].to(tensors["rewards"].dtype), get_adv_estimator_fn(settings["estimator"])
    arguments: dict[str, Any] = {"token_level_rewards": tensors["token_rewards"].clone(), "response_mask": mask}
    if settings["estimator"] == "gae":
        arguments |= {"values": tensors["values"], "gamma": settings["gamma"], "lam": settings["lam"]}
    elif settings["estimator"] == "reinforce_plus_plus":
        arguments["config"] = SimpleNamespace(gamma=settings["gamma"])
    else:
        arguments["index"] = tensors["group_ids"].numpy()
        arguments |= settings.get("arguments", {})
    found, returns = estimator(**arguments)
    return {"advantages": found, "returns": returns}


def aggregated(tensors: Tensors, settings: Settings) -> dict[str, torch.Tensor]:
    """`agg_loss` of given token losses, `losses`."""
    return {"loss": agg_loss(tensors["losses"], tensors["loss_mask"].long(), **settings)}


def metrics(tensors: Tensors, settings: Settings) -> dict[str, torch.Tensor]:
    """What verl measures of the gap between trainer and engine."""
    return logged(compute_offpolicy_metrics(old_log_prob=tensors["proximal_logprobs"], rollout_log_prob=tensors["rollout_logprobs"],
                                            response_mask=tensors["loss_mask"].long()))


def reference_kl(tensors: Tensors, settings: Settings) -> dict[str, torch.Tensor]:
    """Mean over loss tokens of `kind`, with its gradient."""
    mask = tensors["loss_mask"]

    def value(logprobs: torch.Tensor) -> torch.Tensor:
        return agg_loss(kl_penalty(logprobs, tensors["ref_logprobs"], settings["kind"]), mask.long(), "token-mean")

    return with_gradient(tensors["logprobs"], value)


def vanilla_tis(tensors: Tensors, settings: Settings) -> dict[str, torch.Tensor]:
    """What a step of verl does with token TIS; for the benchmark."""
    return loss(tensors, {"mode": "vanilla", "loss_agg_mode": settings["aggregation"],
                          "correction": {"rollout_is": "token", "rollout_is_threshold": settings["cap"]},
                          "actor": {"clip_ratio_low": settings["clip_low"], "clip_ratio_high": settings["clip_high"]}})


def logged(values: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Numbers as arrays, under `metrics/`."""
    return {f"metrics/{name.split('/')[-1]}": torch.tensor(float(value), dtype=torch.float64) for name, value in values.items()}


if __name__ == "__main__":
    serve({"correction": correction, "loss": loss, "preset": preset, "advantages": advantages, "aggregated": aggregated,
           "metrics": metrics, "reference_kl": reference_kl, "vanilla_tis": vanilla_tis})
