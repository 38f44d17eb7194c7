"""The named corrections. No torch here."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from types import MappingProxyType

from asyncrl.correction.spec import Correction
from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset(Correction):
    """A correction with a name, the loss it belongs with, and where both come from."""

    name: str
    loss: str = "decoupled_ppo"
    """The function of `losses` or `catalog` that the origin uses with it."""
    loss_settings: tuple[tuple[str, float], ...] = ()
    """Its arguments where they are not our defaults."""
    aggregation: str = "token_mean"
    origin: str
    """Project and setting, or paper, that it reproduces."""
    departs: str = "nothing known"
    """Where ours is not theirs."""
    evidence: str
    """What holds the two together: the test, or a curve."""


_PRESETS = MappingProxyType({known.name: known for known in (
    Preset(name="none", level="none", origin="no correction: 1707.06347 where proximal and rollout logprobs are the same",
           evidence="hand numbers and the oracle case identity_prox_equals_behave"),
    Preset(name="token_tis", truncate_high=2.0,
           origin="Yao et al. 2025, 'Your efficient RL framework secretly brings you off-policy RL training'",
           evidence="hand numbers and the oracle case decoupled_ppo_token_tis"),
    Preset(name="icepop", mask_low=0.5, mask_high=5.0, origin="IcePop, Ring-1T, 2510.18855; equation 1 of INTELLECT-3, 2512.16144",
           evidence="hand numbers and the oracle case decoupled_ppo_token_mask_denominators"),
)})


def presets() -> tuple[str, ...]:
    """Names that `preset` knows."""
    return tuple(_PRESETS)


def preset(name: str) -> Preset:
    """The named correction. Raises ConfigError for an unknown name, with the nearest known one."""
    if name not in _PRESETS:
        nearest = difflib.get_close_matches(str(name), _PRESETS, n=1, cutoff=0.0)[0]
        raise ConfigError("correction", value=name, allowed=f"one of {', '.join(_PRESETS)}, or a Correction",
                          remedy=f"Did you mean {nearest!r}?")
    return _PRESETS[name]
