"""verl 0.9.1: weights, rejection, policy losses, aggregation, reference KL."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from asyncrl.correction import Bounds, Correction, LossInputs, PolicyLoss, catalog, losses, presets, sequence_losses, weigh
from asyncrl.correction import preset as preset_of
from asyncrl.correction.aggregate import aggregate, count
from asyncrl.correction.preset_spec import Preset
from asyncrl.correction.reference_kl import reference_kl
from tests.parity.peers.cases import NO_CORRECTION, Case, Ours, backward, corrected, first_update, loss_and_gradient, one_anchor, ours_of
from tests.parity.peers.client import Arrays
from tests.parity.peers.scenes import Scene

CLIP = {"clip_low": 0.2, "clip_high": 0.28}
ACTOR = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
WIDE = {"spread": 1.0}
TOKEN_TIS = Correction(truncate_high=2.0)
NORMALISED_AND_REJECTED = Correction(truncate_high=2.0, normalize="token", reject=(Bounds(statistic="k2", high=0.1),), denominator="kept")


def case(name: str, computation: str, ours: Ours, **fields: Any) -> Case:
    return Case(peer="verl", name=name, computation=computation, ours=ours, **{"arrays": Scene.padded, **fields})


def weights_of(correction: Correction) -> Ours:
    return lambda scene: {"weights": corrected(scene, correction)["weights"]}


def kept_by(*rules: Bounds) -> Ours:
    return lambda scene: {"keep_mask": corrected(scene, dataclasses.replace(NO_CORRECTION, reject=rules))["keep_mask"]}


def weighing(name: str, correction: Correction, settings: dict[str, Any], scene: dict[str, Any]) -> Case:
    return case(name, "correction", weights_of(correction), settings=settings, scene=scene)


def rejecting(option: str, threshold: str, rule: Bounds, scene: dict[str, Any]) -> Case:
    settings = {"rollout_rs": option, "rollout_rs_threshold": threshold}
    return case(f"reject_{option}", "correction", kept_by(rule), settings=settings, scene=scene)


def inverted(low: float, high: float) -> dict[str, float]:
    """verl lays the logarithms of "low_high" on −ℓ."""
    return {"low": 1 / high, "high": 1 / low}


WEIGHTS = [
    weighing("token_tis", TOKEN_TIS, {"rollout_is": "token", "rollout_is_threshold": 2.0}, WIDE),
    weighing("token_icepop", Correction(mask_low=0.5, mask_high=5.0), {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}, WIDE),
    weighing("sequence_tis", Correction(level="sequence", truncate_high=2.0), {"rollout_is": "sequence", "rollout_is_threshold": 2.0}, {}),
    weighing("sequence_icepop", Correction(level="sequence", mask_low=0.5, mask_high=5.0),
             {"rollout_is": "sequence", "rollout_is_threshold": "0.5_5.0"}, {}),
    weighing("token_tis_normalised", Correction(truncate_high=2.0, normalize="token"),
             {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": True}, WIDE),
    weighing("sequence_tis_normalised", Correction(level="sequence", truncate_high=2.0, normalize="sequence"),
             {"rollout_is": "sequence", "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": True}, {}),
    case("normalised_and_rejected", "correction", weights_of(NORMALISED_AND_REJECTED),
         settings={"rollout_is": "token", "rollout_is_batch_normalize": True, "rollout_rs": "token_k2", "rollout_rs_threshold": "0.1"},
         as_theirs=lambda scene, _: weights_of(Correction(truncate_high=2.0, normalize="token"))(scene),
         difference="verl leaves the normalised weights of rejected tokens standing, for its mask to hide; ours are 0 there"),
]

REJECTION = [
    rejecting("token_k1", "0.6_1.5", Bounds(statistic="ratio", **inverted(0.6, 1.5)), {}),
    rejecting("token_k2", "0.1", Bounds(statistic="k2", high=0.1), {}),
    rejecting("token_k3", "0.1", Bounds(statistic="k3", high=0.1), {}),
    *(rejecting(f"seq_sum_{kind}", "1.0", Bounds(statistic=kind, level="sequence", reduce="sum", high=1.0), {}) for kind in ("k2", "k3")),
    *(rejecting(f"seq_mean_{kind}", "0.08", Bounds(statistic=kind, level="sequence", high=0.08), {}) for kind in ("k2", "k3")),
    *(rejecting(f"seq_max_{kind}", "0.5", Bounds(statistic=kind, level="sequence", reduce="max", high=0.5), {}) for kind in ("k2", "k3")),
    rejecting("seq_sum_k1", "0.4_2.0", Bounds(statistic="ratio", level="sequence", reduce="sum", **inverted(0.4, 2.0)), {}),
    rejecting("seq_mean_k1", "0.9_1.05", Bounds(statistic="ratio", level="sequence", **inverted(0.9, 1.05)), {}),
    case("reject_two_at_once", "correction",
         kept_by(Bounds(statistic="k2", high=0.3), Bounds(statistic="k3", level="sequence", high=0.1)),
         settings={"rollout_rs": "token_k2,seq_mean_k3", "rollout_rs_threshold": "0.3,0.1"}),
    case("reject_k1_as_documented", "correction", kept_by(Bounds(statistic="ratio", low=0.6, high=1.5)),
         settings={"rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_1.5"},
         as_theirs=lambda scene, _: kept_by(Bounds(statistic="ratio", **inverted(0.6, 1.5)))(scene),
         difference="verl documents the bounds of its k1 rules as those of the ratio and lays their logarithms on −ℓ: they bound the "
                    "inverse"),
]


def loss(name: str, mode: str, ours: Ours, *, actor: dict[str, Any] = ACTOR, **fields: Any) -> Case:
    settings = {"mode": mode, "actor": actor, **fields.pop("settings", {})}
    return case(name, "loss", ours, settings=settings, **fields)


def anchored(function: Callable[..., PolicyLoss], **settings: Any) -> Ours:
    """For losses whose ratio is against the rollout policy: verl's `old_log_prob` is then that."""
    return lambda scene: loss_and_gradient(one_anchor(scene), function, **settings)


def from_one_anchor(scene: Scene) -> Arrays:
    return one_anchor(scene).padded()


def gmpo_weighted(scene: Scene, ours: Arrays) -> Arrays:
    """Our gradient with one weight a sequence: the geometric mean of its tokens' weights, in place of each token's own."""
    weights = corrected(scene, TOKEN_TIS)["weights"]
    plain = loss_and_gradient(scene, sequence_losses.gmpo, mode="seq_mean_token_mean")
    owner = np.repeat(np.arange(len(scene.lengths)), scene.lengths)
    logs = np.where(scene.mask, np.log(np.where(scene.mask, weights, 1.0) + 1e-10), 0.0)
    means = np.exp(np.bincount(owner, logs) / np.bincount(owner, scene.mask))
    return {"gradient": plain["gradient"] * means[owner]}


RATIO_LOSSES = [
    loss("vanilla", "vanilla", ours_of(losses.decoupled_ppo, **CLIP)),
    loss("vanilla_dual_clip", "vanilla", ours_of(losses.decoupled_ppo, **CLIP, dual_clip=1.5), actor={**ACTOR, "clip_ratio_c": 1.5},
         scene=WIDE),
    loss("vanilla_token_tis", "vanilla", ours_of(losses.decoupled_ppo, **CLIP, correction=TOKEN_TIS), scene=WIDE,
         settings={"correction": {"rollout_is": "token", "rollout_is_threshold": 2.0}}),
    loss("vanilla_rejected", "vanilla", ours_of(losses.decoupled_ppo, **CLIP, correction=Correction(
        truncate_high=2.0, reject=(Bounds(statistic="k3", level="sequence", high=0.08),), denominator="kept")),
         settings={"correction": {"rollout_is": "token", "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": "0.08"}}),
    loss("gspo", "gspo", ours_of(sequence_losses.gspo_token, clip_low=0.02, clip_high=0.03, mode="seq_mean_token_mean"),
         actor={"clip_ratio_low": 0.02, "clip_ratio_high": 0.03}, settings={"loss_agg_mode": "seq-mean-token-mean"}),
    loss("gspo_token_mean_weighted", "gspo",
         ours_of(sequence_losses.gspo_token, clip_low=0.02, clip_high=0.03, correction=TOKEN_TIS),
         actor={"clip_ratio_low": 0.02, "clip_ratio_high": 0.03}, settings={"correction": {"rollout_is": "token"}}),
    loss("gmpo", "geo_mean", ours_of(sequence_losses.gmpo, log_clip_low=0.2, log_clip_high=0.28, mode="seq_mean_token_mean")),
    loss("sapo", "sapo", ours_of(catalog.sapo, mode="seq_mean_token_mean"), actor={}, scene=WIDE),
    loss("cispo", "cispo", ours_of(catalog.cispo, **CLIP), scene=WIDE),
    loss("cispo_token_tis", "cispo", ours_of(catalog.cispo, **CLIP, correction=TOKEN_TIS), scene=WIDE,
         settings={"correction": {"rollout_is": "token"}}),
    loss("dppo_tv", "dppo_tv", anchored(catalog.dppo_tv, low=0.05, high=0.1, cap=1.5), arrays=from_one_anchor,
         actor={"clip_ratio_low": 0.05, "clip_ratio_high": 0.1, "clip_ratio_c": 1.5}),
    loss("dppo_kl", "dppo_kl", anchored(catalog.dppo_kl, limit=0.02, cap=1.5), arrays=from_one_anchor,
         actor={"clip_ratio_low": 0.02, "clip_ratio_high": 0.02, "clip_ratio_c": 1.5}),
    loss("dro", "dro", anchored(catalog.dro, beta=0.3), arrays=from_one_anchor, actor={}, settings={"policy_loss": {"dro_beta": 0.3}}),
    loss("gpg", "gpg", ours_of(losses.reinforce), actor={}),
    loss("gmpo_token_tis", "geo_mean", lambda scene: {"gradient": loss_and_gradient(
        scene, sequence_losses.gmpo, log_clip_low=0.4, log_clip_high=0.4, correction=TOKEN_TIS, mode="seq_mean_token_mean")["gradient"]},
         actor={"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}, settings={"correction": {"rollout_is": "token"}},
         as_theirs=gmpo_weighted,
         difference="verl weighs a GMPO sequence by the geometric mean of its tokens' weights, ours weighs each token by its own"),
]


def kl(estimator: str) -> Ours:
    def ours(scene: Scene) -> Arrays:
        batch, current = scene.batch(), scene.tensor("logprobs").requires_grad_()
        inputs = LossInputs.of(batch, weigh(batch, NO_CORRECTION))
        term = reference_kl(current, ref_logprobs=scene.tensor("ref_logprobs"), inputs=inputs, coefficient=1.0, estimator=estimator)
        return backward(term, batch=batch, counted=batch.loss_mask, current=current)

    return ours


def k3_value(scene: Scene, ours: Arrays) -> Arrays:
    return {"loss": kl("k3_forward")(scene)["loss"], "gradient": ours["gradient"]}


def k1_value(scene: Scene, ours: Arrays) -> Arrays:
    gap = (scene.arrays["logprobs"] - scene.arrays["ref_logprobs"])[scene.mask]
    return {"loss": np.asarray(gap.mean()), "gradient": ours["gradient"]}


REFERENCE_KL = [
    case("kl_k2", "reference_kl", kl("k2"), settings={"kind": "k2"}),
    case("kl_k3", "reference_kl", kl("k3_forward"), settings={"kind": "k3"}),
    case("kl_k3_straight_through", "reference_kl", kl("k2"), settings={"kind": "k3+"}, as_theirs=k3_value,
         difference="verl's k1+ and k3+ show the value of k1 or k3 and have the gradient of k2; ours shows what it minimises"),
    case("kl_k1_straight_through", "reference_kl", kl("k2"), settings={"kind": "k1+"}, as_theirs=k1_value,
         difference="verl's k1+ and k3+ show the value of k1 or k3 and have the gradient of k2; ours shows what it minimises"),
]


def aggregation(name: str, *, mode: Any, max_tokens: int | None = None, **settings: Any) -> Case:
    def ours(scene: Scene) -> Arrays:
        mask, offsets = scene.tensor("loss_mask"), scene.batch().cu_seqlens
        whole = count(mask, cu_seqlens=offsets)
        value = aggregate(scene.tensor("logprobs"), loss_mask=mask, cu_seqlens=offsets, denominators=whole, mode=mode,
                          max_tokens=max_tokens)
        return {"loss": np.asarray(value.item() * settings.get("dp_size", 1))}

    def arrays(scene: Scene) -> Arrays:
        rows = scene.padded()
        return {"losses": rows["logprobs"], "loss_mask": rows["loss_mask"]}

    return case(f"aggregate_{name}", "aggregated", ours, settings={"loss_agg_mode": name, **settings}, arrays=arrays)


AGGREGATION = [
    aggregation("token-mean", mode="token_mean"),
    aggregation("token-sum", mode="token_sum", dp_size=2),
    aggregation("seq-mean-token-sum", mode="seq_mean_token_sum"),
    aggregation("seq-mean-token-mean", mode="seq_mean_token_mean"),
    aggregation("seq-mean-token-sum-norm", mode="dr_grpo", max_tokens=100, loss_scale_factor=100),
]


def preset_spread(known: Preset) -> float:
    """So that its rules drop some sequences and keep others."""
    tight = "geo" in known.name
    return 0.002 if tight else 0.12 if "k3" in known.name else 0.4


def preset_case(known: Preset) -> Case:
    name, function = known.name.removeprefix("verl/"), getattr(losses, known.loss)
    bypasses = name.startswith("bypass")
    actor = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}

    def seen(scene: Scene) -> Scene:
        return first_update(scene) if bypasses else scene

    def ours(scene: Scene) -> Arrays:
        return loss_and_gradient(seen(scene), function, correction=known, mode=known.aggregation, **dict(known.loss_settings))

    return case(f"preset_{name}", "preset", ours, settings={"name": name, "actor": actor}, arrays=lambda scene: seen(scene).padded(),
                scene={"spread": preset_spread(known), "sequences": 16})


PRESETS = [preset_case(preset_of(name)) for name in presets() if name.startswith("verl/")]

ALL_REJECTED = case(
    "preset_everything_rejected", "preset",
    ours_of(losses.decoupled_ppo, clip_low=0.2, clip_high=0.2, correction=preset_of("verl/decoupled_k3_rs")),
    settings={"name": "decoupled_k3_rs", "actor": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}}, scene={"spread": 3.0},
    says_nothing=True,
    as_theirs=lambda _, ours: {"loss": np.asarray(np.nan), "gradient": ours["gradient"]},
    difference="Where every sequence is rejected verl divides by 0 tokens and its loss is NaN, its gradient 0; ours are both 0")

CASES = [*WEIGHTS, *REJECTION, *RATIO_LOSSES, *REFERENCE_KL, *AGGREGATION, *PRESETS, ALL_REJECTED]
