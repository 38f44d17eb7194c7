"""What of a step's metrics the clock has no part in."""

from __future__ import annotations

from collections.abc import Mapping

_TIMES = ("_s/", "_per_s/", "wait_frac/", "engine/")
"""What the names of metrics that tell time contain; what an engine did between two steps is a matter of when it did it."""


def timeless(metrics: Mapping[str, float]) -> dict[str, float]:
    """Those that tell no time."""
    return {name: value for name, value in metrics.items() if not any(part in name for part in _TIMES)}
