"""Sections and flips of `correction` and `loss`: three real steps of the trainer must differ."""

from __future__ import annotations

from typing import Any

from tests import config_observers as see
from tests.config_flips import Flip, flip

NO_CORRECTION = {"correction": "none"}
CUSTOM = {"kind": "custom"}
OVER_SEQUENCES = {"correction": {"kind": "custom", "level": "sequence"}}
DROPPING = {"correction": {"kind": "custom", "mask_low": 0.6, "mask_high": 1.2}}
LOSSES: dict[str, dict[str, Any]] = {
    **{kind: {"clip_low": 0.01, "clip_high": 0.01, "dual_clip": 1.3} for kind in ("decoupled_ppo", "ppo")},
    "reinforce": {}, "importance_sampling": {}, **{kind: {"clip_low": 0.01, "clip_high": 0.01} for kind in ("gspo", "gspo_token")},
    "gmpo": {"log_clip_low": 0.01, "log_clip_high": 0.01}, "cispo": {"clip_high": 0.01, "clip_low": 0.01}, "cispo_absolute": {"cap": 1.01},
    "sapo": {"temperature_positive": 2.0, "temperature_negative": 2.0},
    "aspo": {"clip_low": 0.01, "clip_high": 0.01, "cap_positive": 1.01, "cap_negative": 1.01},
    "dppo_tv": {"low": 0.01, "high": 0.01, "cap": 1.1}, "dppo_kl": {"limit": 0.01, "cap": 1.1},
    "prime_rl_dppo": {"low": 0.01, "high": 0.01, "kl_tau": 0.1}, "prime_rl_ipo": {"threshold": 0.01, "kl_tau": 0.1},
    "m2po": {"limit": 1.0, "exact": False, "min_clip_low": 0.9, "min_clip_high": 9.0}, "gepo": {"clip_low": 0.01, "clip_high": 0.01},
    "vespo": {f"{name}_{sign}": 1.5 for name in ("power", "decay") for sign in ("positive", "negative")}, "dro": {"beta": 0.5}}
"""Another value of each setting that is the loss's own."""
RULES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bounds": ({"statistic": "ratio", "low": 0.02, "high": 1.5}, {"statistic": "k2", "level": "sequence", "low": [0.2, 0.1],
                                                                  "high": [0.9, 2.0], "drop": "negative",
                                                                  "name": "other"}),
    "second_moment": ({}, {"limit": 20.0, "form": "tau"}),
    "veto": ({"low": 0.02}, {"low": 0.2}), "outlier": ({"high": 1.0}, {"high": 5.0}),
    "geometric": ({"low": 0.004, "high": 0.3}, {"low": 0.01, "high": 0.05}), "opsm": ({"limit": 5.2}, {"limit": 2.0}),
    "vaco": ({"high": 0.9}, {"high": 0.75}), "kpop": ({"high": 0.01}, {"high": 0.003}),
    "dppo_tv": ({"low": 0.02, "high": 0.01}, {"low": 0.06, "high": 0.1}), "dppo_kl": ({"high": 0.01}, {"high": 0.003})}
"""Settings each rule is tried with, and another value of each; the made-up rollouts are far from any policy."""
SECTIONS: dict[str, Any] = {
    "correction.token_tis": {"kind": "token_tis"}, "correction.icepop": {"kind": "icepop"},
    "correction.preset": {"kind": "preset", "name": "icepop", "loss": "any"}, "correction.custom": CUSTOM,
    **{f"correction.custom.reject.{kind}": [{"kind": kind} | settings] for kind, (settings, _) in RULES.items()},
    **{f"loss.{kind}": {"kind": kind} for kind in LOSSES},
    **{f"reference.{kind}": {"kind": kind, "coefficient": 0.1} for kind in ("in_loss", "in_reward")}}
FLIPS: dict[str, Flip] = {
    "correction.kind": flip("icepop", see.trained),
    "correction.token_tis.truncate_high": flip(1.05, see.trained),
    "correction.icepop.mask_low": flip(0.95, see.trained), "correction.icepop.mask_high": flip(1.05, see.trained),
    "correction.preset.name": flip("token_tis", see.trained),
    "correction.preset.loss": flip("of_preset", see.trained, loss={"kind": "decoupled_ppo", "aggregation": "token_sum"}),
    **{f"correction.custom.{name}": flip(value, see.trained) for name, value in {
        "level": "sequence", "truncate_low": [0.9, 0.8], "truncate_high": [1.05, 1.02], "mask_low": [0.9, 0.8], "mask_high": [1.05, 1.2],
        "normalize": "token", "proximal": "log_linear", "log_clamp": 0.1}.items()},
    "correction.custom.reduce": flip("mean", see.trained, **OVER_SEQUENCES),
    "correction.custom.denominator": flip("kept", see.trained, **DROPPING),
    "correction.custom.reject.kind": flip([{"kind": "outlier", "high": 1.2}], see.trained),
    **{f"correction.custom.reject.{kind}.{name}": flip(value, see.trained)
       for kind, (_, others) in RULES.items() for name, value in others.items()},
    "correction.custom.reject.bounds.reduce": flip("max", see.trained, correction=CUSTOM, correction__reject=[
        {"kind": "bounds", "statistic": "ratio", "level": "sequence", "low": 0.004, "high": 0.5}]),
    "loss.kind": flip("ppo", see.trained, **NO_CORRECTION),
    "reference.kind": flip({"kind": "in_loss", "coefficient": 0.1}, see.trained),
    **{f"reference.in_loss.{name}": flip(value, see.trained, **NO_CORRECTION) for name, value in {
        "coefficient": 0.2, "estimator": "k2"}.items()},
    "reference.in_loss.equal_rewards": flip("leave", see.trained_on_equal_rewards, **NO_CORRECTION),
    "reference.in_reward.coefficient": flip(0.2, see.trained),
    **{f"loss.{kind}.aggregation": flip("seq_mean_token_sum", see.trained, **NO_CORRECTION) for kind in LOSSES},
    **{f"loss.{kind}.entropy_coefficient": flip(0.01, see.trained, **NO_CORRECTION) for kind in LOSSES},
    **{f"loss.{kind}.max_tokens": flip(16, see.trained, **NO_CORRECTION, loss={"kind": kind, "aggregation": "dr_grpo", "max_tokens": 8})
       for kind in LOSSES},
    **{f"loss.{kind}.{name}": flip(value, see.trained, **NO_CORRECTION) for kind, others in LOSSES.items()
       for name, value in others.items()}}


def _of(section: str, *names: str) -> set[str]:
    return {f"{section}.{name}" for name in names}


_BOUNDS = _of("correction.custom", "mask_low", "mask_high", "truncate_low", "truncate_high", "reject.bounds.low", "reject.bounds.high")
_FROM_ZERO = {"clip_low", "clip_high", "log_clip_low", "log_clip_high", "low", "high", "limit", "kl_tau", "threshold", "beta",
              "min_clip_low", "min_clip_high", "entropy_coefficient"}
_BELOW_ONE = {"clip_low", "low", "high", "threshold", "min_clip_low", "exact"}
ACCEPTED: dict[str, set[str]] = {
    "zero": {"correction.custom.reject.opsm.limit",
             *(f"loss.{kind}.{name}" for kind, others in LOSSES.items() for name in {*others, "entropy_coefficient"} & _FROM_ZERO
               if (kind, name) != ("m2po", "limit"))},
    "large": {"reference.in_loss.coefficient", "reference.in_reward.coefficient",
              *_of("correction.custom.reject", "bounds.high", "geometric.high", "dppo_kl.high", "kpop.high", "opsm.limit", "outlier.high",
                   "second_moment.limit", "vaco.high"),
              *(f"loss.{kind}.{name}" for kind, others in LOSSES.items()
                for name in {*others, "max_tokens", "entropy_coefficient"} - _BELOW_ONE)},
    "null": {*_BOUNDS, "loss.cispo.clip_low", *(f"loss.{kind}.dual_clip" for kind in ("decoupled_ppo", "ppo"))}, "list": _BOUNDS}
"""What the numbers of these sections take of what `test_config_numbers` tries."""
