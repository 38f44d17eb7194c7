"""The named corrections, by name. No torch here."""

from __future__ import annotations

import difflib
from types import MappingProxyType

from asyncrl.correction.preset_spec import Preset
from asyncrl.correction.presets_peers import PEERS
from asyncrl.correction.presets_verl import VERL
from asyncrl.errors import ConfigError

__all__ = ["Preset", "preset", "presets"]

_OURS = (
    Preset(name="none", level="none", origin="1707.06347 where proximal and rollout logprobs are the same",
           evidence=("oracle identity_prox_equals_behave",)),
    Preset(name="token_tis", truncate_high=2.0,
           origin="Yao et al. 2025, 'Your efficient RL framework secretly brings you off-policy RL training'",
           evidence=("oracle decoupled_ppo_token_tis",)),
    Preset(name="icepop", mask_low=0.5, mask_high=5.0, origin="IcePop, Ring-1T, 2510.18855; equation 1 of INTELLECT-3, 2512.16144",
           evidence=("oracle decoupled_ppo_token_mask_denominators",)),
)
_PRESETS = MappingProxyType({known.name: known for known in (*_OURS, *VERL, *PEERS)})


def presets() -> tuple[str, ...]:
    """Names that `preset` knows."""
    return tuple(_PRESETS)


def preset(name: str) -> Preset:
    """The named correction. Raises ConfigError for an unknown name, with the nearest known one."""
    if name not in _PRESETS:
        nearest = difflib.get_close_matches(str(name).casefold(), _PRESETS, n=1, cutoff=0.0)[0]
        project = nearest.rpartition("/")[0]
        beside = [known for known in _PRESETS if known.rpartition("/")[0] == project]
        raise ConfigError("correction", value=name, allowed=f"a preset, such as {', '.join(beside)}, or a Correction",
                          remedy=f"Did you mean {nearest!r}? `asyncrl correction list` has all {len(_PRESETS)}.")
    return _PRESETS[name]
