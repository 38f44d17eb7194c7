"""TRL 1.16.0: the losses of its GRPOTrainer, and the weights and advantages it makes of a generation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from asyncrl.correction import Correction, LossInputs, PolicyLoss, catalog, losses, presets, sequence_losses, weigh
from asyncrl.correction import advantages as estimators
from asyncrl.correction import preset as preset_of
from asyncrl.correction.preset_spec import Preset
from asyncrl.correction.reference_kl import reference_kl
from asyncrl.correction.rules import opsm
from tests.parity.peers.cases import Case, Ours, backward, corrected, first_update, loss_and_gradient, one_anchor, ours_of, replaced
from tests.parity.peers.client import Arrays
from tests.parity.peers.scenes import GROUP_SIZE, Scene

CLIP = {"clip_low": 0.2, "clip_high": 0.28}
EPSILONS = {"epsilon_low": 0.2, "epsilon_high": 0.28}
TIS = Correction(truncate_high=2.0)
DEFAULTS: dict[str, Any] = {
    "loss_type": "dapo", "epsilon_low": 0.2, "epsilon_high": 0.2, "delta": None, "importance_sampling_level": "token", "beta": 0.0,
    "off_policy_mask_threshold": None, "use_bias_correction_kl": False}
"""Given with every case, as one trainer answers them all."""
MODES = {"token_truncate": TIS, "token_mask": Correction(mask_high=2.0),
         "sequence_truncate": Correction(level="sequence", truncate_high=2.0), "sequence_mask": Correction(level="sequence", mask_high=2.0)}


def rows_of(scene: Scene) -> Arrays:
    """Its advantages are one a sequence."""
    rows = scene.padded()
    return {**rows, "advantages": rows["advantages"][:, 0]}


def weighted(scene: Scene, correction: Correction = TIS) -> Arrays:
    """With the ratio that its trainer would hand to the loss: ours at loss tokens, 1 elsewhere."""
    rows = rows_of(replaced(scene, ref_logprobs=corrected(scene, correction)["weights"]))
    return {**rows_of(scene), "importance_sampling_ratio": np.where(rows["loss_mask"], rows["ref_logprobs"], 1)}


def loss(name: str, ours: Ours, **settings: Any) -> Case:
    fields = {key: settings.pop(key) for key in ("arrays", "scene", "difference", "as_theirs") if key in settings}
    return Case(peer="trl", name=name, computation="loss", ours=ours, settings={**DEFAULTS, **settings}, **{"arrays": rows_of, **fields})


def with_kl(estimator: str) -> Ours:
    """Decoupled PPO plus 0.1 of the term; both of one anchor, which is where TRL's correction of the term has its ratio from."""
    def ours(scene: Scene) -> Arrays:
        batch, current = one_anchor(scene).batch(), scene.tensor("logprobs").requires_grad_()
        result = weigh(batch, Correction(level="none"))
        inputs = LossInputs.of(batch, result)
        term = reference_kl(current, ref_logprobs=scene.tensor("ref_logprobs"), inputs=inputs, coefficient=0.1, estimator=estimator)
        total = losses.decoupled_ppo(current, inputs=inputs, **CLIP).losses + term
        return backward(total, batch=batch, counted=result.counted, current=current)

    return ours


def masked_sequences(scene: Scene) -> Arrays:
    """OPSM in the first update: TRL compares with the current policy."""
    return loss_and_gradient(first_update(scene), losses.decoupled_ppo, correction=Correction(level="none", reject=(opsm(0.05),)), **CLIP)


def two_sided(logprobs: Any, *, inputs: LossInputs) -> PolicyLoss:
    return losses.decoupled_ppo(logprobs, inputs=inputs, **CLIP, dual_clip=1.4)


def anchored_vespo(scene: Scene) -> Arrays:
    """Ours measures from the policy that sampled; so does theirs where old and sampling logprobs are the same."""
    return loss_and_gradient(one_anchor(scene), catalog.vespo)


def from_one_anchor(scene: Scene) -> Arrays:
    return rows_of(one_anchor(scene))


def vespo_of(correction: Correction) -> Callable[[Scene, Arrays], Arrays]:
    """TRL's ratio of a sequence: the product of current / old and of the weights, which are old / sampling, bounded, at least 1e-8."""
    def theirs(scene: Scene, _: Arrays) -> Arrays:
        weights = np.where(scene.mask, corrected(scene, correction)["weights"], 1.0)
        anchor = (scene.arrays["proximal_logprobs"] - np.log(weights.clip(1e-8))).astype(scene.arrays["logprobs"].dtype)
        return loss_and_gradient(replaced(scene, rollout_logprobs=anchor), catalog.vespo)

    return theirs


LOSSES = [
    loss("dapo", ours_of(losses.decoupled_ppo, **CLIP), **EPSILONS),
    loss("dapo_token_tis", ours_of(losses.decoupled_ppo, **CLIP, correction=TIS), **EPSILONS, arrays=weighted, scene={"spread": 1.0}),
    loss("bnpo", ours_of(losses.decoupled_ppo, **CLIP), loss_type="bnpo", **EPSILONS),
    loss("grpo", ours_of(losses.decoupled_ppo, **CLIP, mode="seq_mean_token_mean"), loss_type="grpo", **EPSILONS),
    loss("dr_grpo", ours_of(losses.decoupled_ppo, **CLIP, mode="dr_grpo", max_tokens=4), loss_type="dr_grpo", **EPSILONS),
    loss("two_sided_clip", ours_of(two_sided), **EPSILONS, delta=1.4, scene={"spread": 1.0}),
    loss("gspo", ours_of(sequence_losses.gspo, clip_low=0.02, clip_high=0.03, mode="seq_mean_token_mean"), loss_type="grpo",
         importance_sampling_level="sequence", epsilon_low=0.02, epsilon_high=0.03),
    loss("cispo", ours_of(catalog.cispo_absolute, cap=1.5), loss_type="cispo", epsilon_high=1.5, scene={"spread": 1.0}),
    loss("sapo", ours_of(catalog.sapo, mode="seq_mean_token_mean"), loss_type="sapo", sapo_temperature_pos=1.0, sapo_temperature_neg=1.05,
         scene={"spread": 1.0}),
    loss("vespo", anchored_vespo, loss_type="vespo", arrays=from_one_anchor, scene={"spread": 0.2}),
    loss("vespo_token_tis", ours_of(catalog.vespo), loss_type="vespo", arrays=weighted, scene={"spread": 0.3}, as_theirs=vespo_of(TIS),
         difference="TRL's VESPO bounds old / sampling token by token before it multiplies a sequence's ratio; ours is the whole ratio"),
    loss("vespo_token_mask", ours_of(catalog.vespo), loss_type="vespo", scene={"spread": 0.3},
         arrays=lambda scene: weighted(scene, MODES["token_mask"]), as_theirs=vespo_of(MODES["token_mask"]),
         difference="In TRL's VESPO one token that token_mask drops multiplies the ratio of its sequence by 1e-8: the sequence is dropped"),
    loss("opsm", masked_sequences, off_policy_mask_threshold=0.05, **EPSILONS, arrays=lambda scene: rows_of(first_update(scene))),
    loss("kl_k3", with_kl("k3_forward"), beta=0.1, **EPSILONS, arrays=from_one_anchor),
    loss("kl_k3_importance", with_kl("k3_importance"), beta=0.1, use_bias_correction_kl=True, **EPSILONS, arrays=from_one_anchor),
]


def generation(name: str, ours: Ours, *, mode: str, low: float | None = None, **fields: Any) -> Case:
    settings = {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": 2.0, "vllm_importance_sampling_clip_min": low,
                "num_generations": GROUP_SIZE, "beta": 0.0}
    return Case(peer="trl", name=name, computation="generation", ours=ours, settings=settings, **{"arrays": rows_of, **fields})


def weights_of(correction: Correction) -> Ours:
    return lambda scene: {"importance_sampling_ratio": corrected(scene, correction)["weights"]}


def grpo_advantages(scene: Scene) -> Arrays:
    return {"advantages": estimators.grpo(scene.rewards, group_ids=scene.group_ids, epsilon=1e-4)}


def preset_case(known: Preset) -> Case:
    """Its weights by the preset that has the mode's name."""
    mode = known.name.removeprefix("trl/")
    low, high = (getattr(known, f"{'mask' if mode.endswith('mask') else 'truncate'}_{side}") for side in ("low", "high"))
    case = generation(f"preset_{mode}", weights_of(known), mode=mode, low=low, tolerance=2e-5, scene={"spread": 1.0})
    return Case(**{**{name: getattr(case, name) for name in case.__slots__},
                   "settings": {**case.settings, "vllm_importance_sampling_clip_max": high}})


GENERATION = [
    *(generation(mode, weights_of(correction), mode=mode, tolerance=2e-5, scene={"spread": 0.3}) for mode, correction in MODES.items()),
    generation("token_truncate_both_ways", weights_of(Correction(truncate_low=0.7, truncate_high=2.0)), mode="token_truncate", low=0.7,
               tolerance=2e-5),
    generation("advantages_grpo", grpo_advantages, mode="token_truncate", dtypes=("float64",)),
]

PRESETS = [preset_case(preset_of(name)) for name in presets() if name.startswith("trl/")]

CASES = [*LOSSES, *GENERATION, *PRESETS]
