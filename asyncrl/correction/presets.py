"""What a correction is, and the named ones. No torch here: configuration and controller read this file."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from asyncrl.errors import ConfigError

LOG_CLAMP = 20.0
"""Log-ratios are held to ±20 before exp: e^20 = 4.9e8 has room in float32 even squared, and lies far beyond any bound in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """How the log-ratio ℓ = proximal − rollout of a token becomes its importance weight. Bounds are given as ratios.

    With ratio = exp(clamp(ℓ, ±log_clamp)):

        keep   = loss_mask and mask_low ≤ ratio ≤ mask_high
        weight = min(ratio, truncate_high) if keep else 0         level "token"
        weight = 1 if keep else 0                                 level "none"

    Raises ConfigError for bounds that contradict one another or that the clamp would hide.
    """

    level: Literal["none", "token"] = "token"
    """What a weight is formed over; "none" leaves every kept token at weight 1."""
    truncate_high: float | None = None
    """Weights above it are lowered to it (TIS). None: no cap."""
    mask_low: float | None = None
    """Tokens whose ratio is below it lose their gradient (MIS, IcePop). None: no lower bound."""
    mask_high: float | None = None
    """Tokens whose ratio is above it lose their gradient. None: no upper bound."""
    log_clamp: float = LOG_CLAMP
    """Bound on |ℓ| before exp; tokens beyond it are counted."""

    def __post_init__(self) -> None:
        if self.level not in ("none", "token"):
            raise ConfigError("correction.level", value=self.level, allowed="'none' or 'token'", remedy="Choose one of the two.")
        if not 0.0 < self.log_clamp <= 40.0:
            raise ConfigError("correction.log_clamp", value=self.log_clamp, allowed="a number in (0, 40]",
                              remedy="Leave it at 20; above 40 a squared ratio overflows float32.")
        for name in ("truncate_high", "mask_low", "mask_high"):
            self._check_bound(name)
        if self.level == "none" and self.truncate_high is not None:
            raise ConfigError("correction.truncate_high, correction.level", value=(self.truncate_high, self.level),
                              allowed="a cap only where there are weights", remedy="Set level to 'token' or remove the cap.")
        if self.mask_low is not None and self.mask_high is not None and self.mask_low >= self.mask_high:
            raise ConfigError("correction.mask_low, correction.mask_high", value=(self.mask_low, self.mask_high),
                              allowed="mask_low below mask_high", remedy="No token would be kept; widen the range.")

    @property
    def is_token_local(self) -> bool:
        """Whether the weight of a token depends on that token alone, so that any slice of a batch gives the same result."""
        return self.level in ("none", "token")

    def _check_bound(self, name: str) -> None:
        value = getattr(self, name)
        if value is not None and not math.exp(-self.log_clamp) < value < math.exp(self.log_clamp):
            raise ConfigError(f"correction.{name}", value=value,
                              allowed=f"a ratio above 0 and inside exp(±{self.log_clamp:g})",
                              remedy="Bounds are ratios, not log-ratios: 2.0 means twice as likely under the trainer.")


_PRESETS = MappingProxyType({
    "none": Correction(level="none"),
    "token_tis": Correction(truncate_high=2.0),
    "icepop": Correction(mask_low=0.5, mask_high=5.0),
})


def presets() -> tuple[str, ...]:
    """Names that `preset` knows."""
    return tuple(_PRESETS)


def preset(name: str) -> Correction:
    """The named correction. Raises ConfigError for an unknown name, with the nearest known one.

    none       weight 1 on every token. With proximal = rollout logprobs the decoupled loss is then plain PPO against the
               policy that sampled (1707.06347); with recomputed proximal logprobs nothing corrects for the gap between the two.
    token_tis  w = min(ratio, 2). Truncated importance sampling (Ionides 2008) between engine and trainer: Yao et al. 2025,
               "Your efficient RL framework secretly brings you off-policy RL training". Cap 2 as in verl and ms-swift.
    icepop     w = ratio where 0.5 ≤ ratio ≤ 5, otherwise the token is dropped: M(k) of IcePop (Ring-1T, 2510.18855), as in
               INTELLECT-3 (2512.16144, equation 1), with verl's range. Dropped tokens stay in the denominator.
    """
    if name not in _PRESETS:
        nearest = difflib.get_close_matches(str(name), _PRESETS, n=1, cutoff=0.0)[0]
        raise ConfigError("correction", value=name, allowed=f"one of {', '.join(_PRESETS)}, or a Correction",
                          remedy=f"Did you mean {nearest!r}?")
    return _PRESETS[name]
