"""The clip range of a policy loss, as distances from 1. Needs no torch: configuration reads it too."""

from __future__ import annotations

import math

from asyncrl.errors import ConfigError


def clip_range(clip_low: float, clip_high: float, dual_clip: float | None = None) -> tuple[float, float, float | None]:
    """(1 − clip_low, 1 + clip_high, dual_clip): ratios, for `losses.clipped_surrogate`. Raises ConfigError for a range without 1."""
    if not 0.0 <= clip_low <= 1.0 or not 0.0 <= clip_high < math.inf:
        raise ConfigError("loss.clip_low, loss.clip_high", value=(clip_low, clip_high), allowed="clip_low in [0, 1], clip_high ≥ 0",
                          remedy="Both are distances from 1: ratios are clipped to [1 − clip_low, 1 + clip_high].")
    if dual_clip is not None and not 1.0 + clip_high < dual_clip < math.inf:
        raise ConfigError("loss.dual_clip, loss.clip_high", value=(dual_clip, clip_high), allowed="dual_clip above 1 + clip_high",
                          remedy="It is a ratio: the largest that counts where the advantage is negative. The paper has 3.")
    return 1.0 - clip_low, 1.0 + clip_high, dual_clip
