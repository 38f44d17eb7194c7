"""verl 0.9.1: advantage estimators and what it measures of the gap between trainer and engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.correction import Correction, correct, token_advantages
from asyncrl.correction import advantages as estimators
from asyncrl.correction.whitening import whiten
from tests.parity.peers.cases import NO_CORRECTION, Case, Ours
from tests.parity.peers.client import Arrays
from tests.parity.peers.scenes import Scene

Rows = NDArray[np.float64]

GAP = {"kl": "kl_k1/mean", "k3_kl": "kl_k3/mean", "chi2_token": "chi2/mean", "chi2_seq": "chi2_sequence/mean",
       "rollout_log_ppl": "rollout_log_ppl/mean", "training_log_ppl": "proximal_log_ppl/mean", "log_ppl_diff": "log_ppl_gap/mean"}
OF_SEQUENCES = ("chi2_seq", "rollout_log_ppl", "training_log_ppl", "log_ppl_diff")
APPLIED = {"rollout_is_mean": "weight/mean", "rollout_is_eff_sample_size": "ess/frac", "rollout_is_ratio_fraction_high": "truncated/frac"}


def spread(scene: Scene, rows: Rows) -> Arrays:
    """[N] as verl has it, at every loss token."""
    return {"advantages": np.where(scene.mask, rows.repeat(scene.lengths), 0.0)}


def lengths_of(scene: Scene) -> Rows:
    """[N] loss tokens."""
    return np.add.reduceat(scene.mask, scene.cu_seqlens[:-1]).astype(np.float64)


def outcome(name: str, estimate: Callable[[Scene], Rows], **fields: Any) -> Case:
    estimator, arguments = fields.pop("estimator", name), fields.pop("arguments", {})
    return Case(peer="verl", name=f"advantages_{name}", computation="advantages", ours=lambda scene: spread(scene, estimate(scene)),
                arrays=fields.pop("arrays", Scene.padded), settings={"estimator": estimator, "arguments": arguments}, dtypes=("float64",),
                **fields)


def by_group(function: Callable[..., Rows], **settings: Any) -> Callable[[Scene], Rows]:
    return lambda scene: function(scene.rewards, group_ids=scene.group_ids, **settings)


def by_length(function: Callable[..., Rows]) -> Callable[[Scene], Rows]:
    return lambda scene: function(scene.rewards, group_ids=scene.group_ids, lengths=lengths_of(scene))


def singles(scene: Scene) -> Scene:
    """The first sequence is a group of its own."""
    ids = scene.group_ids.copy()
    ids[0] = 99
    return Scene(scene.arrays, scene.rewards, scene.lengths, ids)


def with_raw_reward(scene: Scene, ours: Arrays, *, divisor: float) -> Arrays:
    """A group of one keeps its reward."""
    first = scene.mask & (np.arange(len(scene.mask)) < scene.lengths[0])
    return {"advantages": np.where(first, scene.rewards[0] / divisor, ours["advantages"])}


def single(name: str, function: Callable[[Scene], Rows], *, divisor: float = 1.0) -> Case:
    return outcome(f"{name}_group_of_one", lambda scene: function(singles(scene)), estimator=name,
                   arrays=lambda scene: singles(scene).padded(),
                   as_theirs=lambda scene, ours: with_raw_reward(scene, ours, divisor=divisor),
                   difference="verl gives a group of one its raw reward for an advantage; ours gives 0, having nothing to compare it with")


def token_level(name: str, ours: Ours, **settings: Any) -> Case:
    return Case(peer="verl", name=f"advantages_{name}", computation="advantages", ours=ours, arrays=with_values, dtypes=("float64",),
                settings={"estimator": name, **settings})


def values_of(scene: Scene) -> Rows:
    """A critic's: any numbers will do."""
    return np.where(scene.mask, scene.arrays["ref_logprobs"], 0.0)


def with_values(scene: Scene) -> Arrays:
    rows = scene.padded()
    return {**rows, "values": np.where(rows["loss_mask"], rows["ref_logprobs"], 0.0)}


def token_rewards(scene: Scene) -> Rows:
    return np.where(scene.is_last, scene.rewards.repeat(scene.lengths), 0.0)


def reinforce_plus_plus(scene: Scene) -> Arrays:
    found = token_advantages.reinforce_plus_plus(token_rewards(scene), loss_mask=scene.mask, cu_seqlens=scene.cu_seqlens, gamma=0.9)
    return {"advantages": found}


def gae(scene: Scene) -> Arrays:
    found = token_advantages.gae(token_rewards(scene), values=values_of(scene), loss_mask=scene.mask, cu_seqlens=scene.cu_seqlens,
                                 gamma=0.97, lam=0.9)
    return {"advantages": whiten(found.advantages, counts=scene.mask), "returns": found.returns}


def measured(scene: Scene, correction: Correction, names: dict[str, str]) -> Arrays:
    metrics = correct(scene.batch(), correction).metrics.result()
    return {f"metrics/{theirs}": np.asarray(metrics[f"correction/{ours}"]) for theirs, ours in names.items()}


def emptied(scene: Scene) -> Scene:
    """The first sequence has no loss token."""
    mask = scene.mask & (np.arange(len(scene.mask)) >= scene.lengths[0])
    versions = np.where(mask, scene.arrays["policy_versions"], -1)
    return Scene({**scene.arrays, "loss_mask": mask, "policy_versions": versions}, scene.rewards, scene.lengths, scene.group_ids)


def with_zeros(scene: Scene, ours: Arrays) -> Arrays:
    """Means over all rows, the empty one a 0 among them; chi² takes it for a ratio of 1, which is a 0 too."""
    share = (len(scene.lengths) - 1) / len(scene.lengths)
    return {name: values * share if name.removeprefix("metrics/") in OF_SEQUENCES else values for name, values in ours.items()}


ADVANTAGES = [
    outcome("grpo", by_group(estimators.grpo)),
    outcome("dr_grpo", by_group(estimators.dr_grpo), estimator="grpo", arguments={"norm_adv_by_std_in_grpo": False}),
    outcome("grpo_vectorized", by_group(estimators.grpo)),
    outcome("rloo", by_group(estimators.rloo)),
    outcome("rloo_vectorized", by_group(estimators.rloo)),
    outcome("opo", by_length(estimators.opo)),
    outcome("reinforce_plus_plus_baseline", by_length(estimators.reinforce_plus_plus_baseline)),
    single("grpo", by_group(estimators.grpo), divisor=1.0 + 1e-6),
    single("rloo", by_group(estimators.rloo)),
    single("opo", by_length(estimators.opo)),
    token_level("reinforce_plus_plus", reinforce_plus_plus, gamma=0.9),
    token_level("gae", gae, gamma=0.97, lam=0.9),
]

METRICS = [
    Case(peer="verl", name="metrics", computation="metrics", ours=lambda scene: measured(scene, NO_CORRECTION, GAP), arrays=Scene.padded),
    Case(peer="verl", name="metrics_of_weights", computation="correction", settings={"rollout_is": "token"}, scene={"spread": 1.0},
         ours=lambda scene: measured(scene, Correction(truncate_high=2.0), APPLIED), arrays=Scene.padded),
    Case(peer="verl", name="metrics_with_an_empty_sequence", computation="metrics", arrays=lambda scene: emptied(scene).padded(),
         ours=lambda scene: measured(emptied(scene), NO_CORRECTION, GAP), as_theirs=with_zeros,
         difference="verl's means over sequences count one without a loss token as 0; ours leave it out"),
]

CASES = [*ADVANTAGES, *METRICS]
