"""AReaL 1.0.4: the PPO actor's loss, rejection sampling, M2PO, SAPO, proximal approximations."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from asyncrl.correction import Bounds, Correction, LossInputs, SecondMoment, catalog, losses, sequence_losses, weigh
from asyncrl.correction import preset as preset_of
from asyncrl.correction.overlong import overlong_penalty
from asyncrl.correction.preset_spec import Preset
from asyncrl.correction.proximal import linear_in_probability, log_linear, log_linear_alpha
from tests.parity.peers.cases import Case, Ours, backward, corrected, loss_and_gradient, one_anchor, ours_of
from tests.parity.peers.client import Arrays
from tests.parity.peers.scenes import VERSION, Scene

CLIP = {"clip_low": 0.2, "clip_high": 0.28}
ARGUMENTS: dict[str, Any] = {"eps_clip": 0.2, "eps_clip_higher": 0.28}
FLOAT32 = 2e-5
"""AReaL forms its weights in float32, whatever it gets."""


def case(name: str, computation: str, ours: Ours, **fields: Any) -> Case:
    return Case(peer="areal", name=name, computation=computation, ours=ours, **{"arrays": Scene.packed, **fields})


def loss(name: str, ours: Ours, *, rejection: dict[str, Any] | None = None, scene: dict[str, Any] | None = None, **arguments: Any) -> Case:
    return case(name, "loss", ours, settings={"rejection_sampling": rejection, "arguments": {**ARGUMENTS, **arguments}}, scene=scene or {},
                tolerance=FLOAT32)


def rejecting(name: str, correction: Correction, *, scene: dict[str, Any] | None = None, **settings: Any) -> Case:
    return case(f"rejected_{name}", "rejected", lambda drawn: corrected(drawn, correction), settings={"rejection_sampling": settings},
                scene=scene or {}, tolerance=FLOAT32)


def kept_by(rule: Bounds | SecondMoment) -> Ours:
    return lambda scene: {"keep_mask": corrected(scene, Correction(level="none", reject=(rule,)))["keep_mask"]}


def sequence_kl(name: str, rule: Bounds, **settings: Any) -> Case:
    """AReaL keeps each token's own weight where the metric is a divergence."""
    correction = Correction(reject=(rule,))
    return rejecting(name, correction, level="sequence", **settings)


LOSSES = [
    loss("ppo", ours_of(losses.decoupled_ppo, **CLIP)),
    loss("dual_clip", ours_of(losses.decoupled_ppo, **CLIP, dual_clip=1.5), c_clip=1.5, scene={"spread": 1.0}),
    loss("decoupled_token_tis", ours_of(losses.decoupled_ppo, **CLIP, correction=Correction(truncate_high=2.0)), scene={"spread": 1.0},
         rejection={"level": "token", "action": "clamp", "metric": "ratio", "upper": 2.0}),
    loss("decoupled_token_mask", ours_of(losses.decoupled_ppo, **CLIP, correction=Correction(mask_low=0.5, mask_high=2.0)),
         rejection={"level": "token", "action": "mask", "metric": "ratio", "lower": 0.5, "upper": 2.0}),
    loss("gspo", ours_of(sequence_losses.gspo, clip_low=0.02, clip_high=0.03), importance_sampling_level="sequence", eps_clip=0.02,
         eps_clip_higher=0.03),
]

REJECTION = [
    rejecting("token_clamp", Correction(truncate_low=0.5, truncate_high=2.0), action="clamp", upper=2.0, lower=0.5),
    rejecting("token_mask", Correction(mask_high=1.5), action="mask", upper=1.5),
    rejecting("token_kl_k2", Correction(reject=(Bounds(statistic="k2", high=0.1),)), metric="kl_k2", upper=0.1),
    rejecting("token_kl_k1", Correction(reject=(Bounds(statistic="ratio", high=1.5),)), metric="kl_k1", upper=float(np.log(1.5))),
    rejecting("token_kl_k3", Correction(reject=(Bounds(statistic="k3_reverse", high=0.1),)), metric="kl_k3", upper=0.1),
    rejecting("sequence_clamp", Correction(level="sequence", reduce="mean", truncate_low=0.9, truncate_high=1.1), level="sequence",
              action="clamp", upper=1.1, lower=0.9),
    rejecting("sequence_mask", Correction(level="sequence", reduce="mean", mask_low=0.9, mask_high=1.1), level="sequence", upper=1.1,
              lower=0.9),
    rejecting("sequence_mask_of_products", Correction(level="sequence", reduce="mean", reject=(
        Bounds(statistic="ratio", level="sequence", reduce="sum", low=0.5, high=2.0),)), level="sequence", agg="sum", upper=2.0, lower=0.5),
    rejecting("sequence_mask_of_largest", Correction(level="sequence", reduce="mean", reject=(
        Bounds(statistic="ratio", level="sequence", reduce="max", high=2.0),)), level="sequence", agg="max", upper=2.0),
    *(sequence_kl(f"sequence_kl_k2_{how}", Bounds(statistic="k2", level="sequence", reduce=how, high=high), metric="kl_k2", agg=how,
                  upper=high) for how, high in (("sum", 1.0), ("mean", 0.08), ("max", 0.4))),
    case("kl_k3_as_documented", "rejected", kept_by(Bounds(statistic="k3", high=0.1)),
         settings={"rejection_sampling": {"metric": "kl_k3", "upper": 0.1}}, tolerance=FLOAT32,
         as_theirs=lambda scene, _: kept_by(Bounds(statistic="k3_reverse", high=0.1))(scene),
         difference="AReaL documents kl_k3 as r − log r − 1 with r = proximal / rollout and computes it with 1 / r: our k3_reverse"),
    case("m2po", "m2po", kept_by(SecondMoment(limit=0.04)), settings={"m2_threshold": 0.04}),
]


def sapo(scene: Scene) -> Arrays:
    return loss_and_gradient(one_anchor(scene), catalog.sapo)


def approximations(scene: Scene, *, current_version: int) -> Arrays:
    """Ours for a step that started one version before `current_version`."""
    versions, mask = scene.tensor("policy_versions"), scene.tensor("loss_mask")
    alpha = log_linear_alpha(versions, proximal_version=current_version - 1, current_version=current_version)
    current, rollout = (torch.where(mask, scene.tensor(name), 0.0) for name in ("logprobs", "rollout_logprobs"))
    guess = log_linear(current, rollout_logprobs=rollout, alpha=alpha, loss_mask=mask, correction=Correction(proximal="log_linear"))
    linear = linear_in_probability(current, rollout_logprobs=rollout, alpha=alpha)
    return {"loglinear": guess.logprobs.numpy(), "linear": torch.where(mask, linear, 0.0).numpy()}


def one_behind(scene: Scene) -> Arrays:
    """Ours with the anchor that AReaL takes."""
    return approximations(scene, current_version=VERSION)


def overlong(scene: Scene) -> Arrays:
    lengths = np.add.reduceat(scene.mask, scene.cu_seqlens[:-1])
    return {"rewards": scene.rewards + overlong_penalty(lengths, max_tokens=20, cache_tokens=8, unclamped=True)}


def log_linear_loss(scene: Scene, known: Preset) -> Arrays:
    """A step whose proximal logprobs are made of the current ones."""
    batch, current = scene.batch(), scene.tensor("logprobs").requires_grad_()
    alpha = weigh(batch, known).alpha
    assert alpha is not None
    guess = log_linear(current.detach(), rollout_logprobs=batch.rollout_logprobs, alpha=alpha, loss_mask=batch.loss_mask, correction=known)
    inputs = LossInputs(rollout_logprobs=batch.rollout_logprobs, proximal_logprobs=guess.logprobs, advantages=batch.advantages,
                        weights=guess.weights, keep_mask=batch.loss_mask, counted=batch.loss_mask, cu_seqlens=batch.cu_seqlens)
    result = losses.decoupled_ppo(current, inputs=inputs, **dict(known.loss_settings))
    return backward(result.losses, batch=batch, counted=batch.loss_mask, current=current, mode=known.aggregation)


def preset_case(name: str, rejection: dict[str, Any] | None, **arguments: Any) -> Case:
    """All of an actor's step in AReaL's own settings, and by the preset of ours."""
    known = preset_of(f"areal/{name}")

    def ours(scene: Scene) -> Arrays:
        if known.proximal == "log_linear":
            return log_linear_loss(scene, known)
        return loss_and_gradient(scene, getattr(losses, known.loss), correction=known, mode=known.aggregation, **dict(known.loss_settings))

    step = {"eps_clip": 0.2, "eps_clip_higher": None, "c_clip": None, "current_version": VERSION, **arguments}
    return case(f"preset_{name}", "actor_step", ours, dtypes=("float32",), settings={"rejection_sampling": rejection, "arguments": step},
                scene={"spread": 2.0})


PRESETS = [
    preset_case("decoupled", {}),
    preset_case("decoupled_unweighted", None),
    preset_case("token_truncate", {"action": "clamp", "upper": 5.0}),
    preset_case("sequence_mask", {"level": "sequence", "upper": 5.0}),
    preset_case("sequence_truncate", {"level": "sequence", "action": "clamp", "upper": 5.0}),
    preset_case("m2po", None, m2_threshold=0.04),
    preset_case("loglinear", {"action": "clamp", "upper": 5.0}, prox_logp_method="loglinear", current_version=VERSION + 1),
]
"""`kpop` came after 1.0.4. `loglinear` is told a version more than AReaL's trainer tells it: see `proximal_as_its_trainer_calls_it`."""

OTHERS = [
    case("sapo", "sapo", sapo, settings={"tau_pos": 1.0, "tau_neg": 1.05}, scene={"spread": 0.6}),
    case("proximal", "proximal", lambda scene: approximations(scene, current_version=VERSION + 1), tolerance=FLOAT32,
         settings={"current_version": VERSION + 1}),
    case("proximal_as_its_trainer_calls_it", "proximal", lambda scene: approximations(scene, current_version=VERSION + 1),
         settings={"current_version": VERSION}, tolerance=FLOAT32, as_theirs=lambda scene, _: one_behind(scene),
         difference="AReaL's trainer takes the version before the step's for the proximal one and the step's for the current one; ours is "
                    "anchored at the weights the step starts from"),
    case("overlong", "overlong", overlong, settings={"overlong_tokens": 8, "overlong_penalty_factor": 1.0, "max_response_length": 20},
         arrays=Scene.padded, dtypes=("float64",)),
]

CASES = [*LOSSES, *REJECTION, *PRESETS, *OTHERS]
