"""AReaL's PPO actor loss, its rejection sampling, M2PO mask and proximal approximations. Runs in AReaL's environment.

Arrays are packed [T] with `cu_seqlens`, or padded [N, L] without.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from areal.api.cli_args import RejectionSamplingConfig
from areal.trainer.ppo.actor import _apply_m2po_masking, compute_prox_logp_approximations, grpo_loss_fn
from areal.utils.functional import ppo_actor_loss_fn, sapo_loss_fn
from areal.utils.functional.functional import apply_rejection_sampling, reward_overlong_penalty

sys.path.insert(0, str(Path(__file__).parent))

from adapter import Settings, Tensors, serve, with_gradient


def rejection(settings: Settings) -> RejectionSamplingConfig | None:
    """`rejection_sampling` are fields of AReaL's own configuration."""
    chosen = settings.get("rejection_sampling")
    return None if chosen is None else RejectionSamplingConfig(**chosen)


def loss(tensors: Tensors, settings: Settings) -> dict[str, torch.Tensor]:
    """`ppo_actor_loss_fn` with its gradient. Its denominator is the loss mask before rejection."""
    def value(logprobs: torch.Tensor) -> torch.Tensor:
        return ppo_actor_loss_fn(
            logprobs, proximal_logprobs=tensors["proximal_logprobs"], old_logprobs=tensors["rollout_logprobs"],
            advantages=tensors["advantages"], loss_mask=tensors["loss_mask"], cu_seqlens=tensors.get("cu_seqlens"),
            rejection_sampling=rejection(settings), **settings["arguments"])[0]

    return with_gradient(tensors["logprobs"], value)


def actor_step(tensors: Tensors, settings: Settings) -> dict[str, torch.Tensor]:
    """`grpo_loss_fn`, all of an actor's step from logprobs on: proximal logprobs by method, M2PO, rejection, loss. float32 alone."""
    data = {"logprobs": tensors["rollout_logprobs"], "advantages": tensors["advantages"], "loss_mask": tensors["loss_mask"]}
    data |= {"versions": tensors["policy_versions"], "cu_seqlens": tensors["cu_seqlens"]}
    if settings["arguments"].get("prox_logp_method") != "loglinear":
        data["prox_logp"] = tensors["proximal_logprobs"]

    def value(logprobs: torch.Tensor) -> torch.Tensor:
        return grpo_loss_fn(logprobs, torch.zeros_like(logprobs), data, rejection_sampling=rejection(settings), **settings["arguments"])

    return with_gradient(tensors["logprobs"], value)


def sapo(tensors: Tensors, settings: Settings) -> dict[str, torch.Tensor]:
    """`sapo_loss_fn` with its gradient."""
    def value(logprobs: torch.Tensor) -> torch.Tensor:
        return sapo_loss_fn(logprobs, old_logprobs=tensors["rollout_logprobs"], advantages=tensors["advantages"],
                            loss_mask=tensors["loss_mask"], cu_seqlens=tensors["cu_seqlens"], **settings)[0]

    return with_gradient(tensors["logprobs"], value)


def rejected(tensors: Tensors, settings: Settings) -> dict[str, torch.Tensor]:
    """`weights` and `keep_mask` of its rejection sampling."""
    config = rejection(settings)
    assert config is not None
    result = apply_rejection_sampling(tensors["proximal_logprobs"], old_logprobs=tensors["rollout_logprobs"],
                                      loss_mask=tensors["loss_mask"], cu_seqlens=tensors["cu_seqlens"], config=config)
    return {"weights": result.behave_imp_weight, "keep_mask": result.loss_mask}


def m2po(tensors: Tensors, settings: Settings) -> dict[str, torch.Tensor]:
    """The mask that its second-moment bound leaves."""
    return {"keep_mask": _apply_m2po_masking(tensors["rollout_logprobs"], tensors["proximal_logprobs"], tensors["loss_mask"],
                                             settings["m2_threshold"])}


def proximal(tensors: Tensors, settings: Settings) -> dict[str, torch.Tensor]:
    """Its approximations of the proximal logprobs, by method."""
    return compute_prox_logp_approximations(old_logp=tensors["rollout_logprobs"], logprobs=tensors["logprobs"],
                                            versions=tensors["policy_versions"], current_version=settings["current_version"])


def overlong(tensors: Tensors, settings: Settings) -> dict[str, torch.Tensor]:
    """Rewards after its penalty on length; takes padded masks."""
    data: dict[str, Any] = {"rewards": tensors["rewards"].clone(), "loss_mask": tensors["loss_mask"], "input_ids": tensors["loss_mask"]}
    return {"rewards": reward_overlong_penalty(data, **settings)["rewards"]}


def decoupled_tis(tensors: Tensors, settings: Settings) -> dict[str, torch.Tensor]:
    """Decoupled loss with token weights truncated at `cap`; for the benchmark."""
    return loss(tensors, {"rejection_sampling": {"level": "token", "action": "clamp", "metric": "ratio", "upper": settings["cap"]},
                          "arguments": {"eps_clip": settings["clip_low"], "eps_clip_higher": settings["clip_high"]}})


if __name__ == "__main__":
    serve({"loss": loss, "actor_step": actor_step, "sapo": sapo, "rejected": rejected, "m2po": m2po, "proximal": proximal,
           "overlong": overlong, "decoupled_tis": decoupled_tis})
