"""What the planner refuses: one message a mistake, with its remedy."""

from __future__ import annotations

import math

from asyncrl.errors import ConfigError


def at_least(low: float, *, strictly: bool = False, **numbers: float) -> None:
    """Raises ConfigError for the first number that is none, is not finite, or is below `low` (or equal, strictly)."""
    for field, value in numbers.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or value < low or (strictly and value == low):
            raise ConfigError(field, value=value, allowed=f"a finite number {'above' if strictly else 'of at least'} {low:g}",
                              remedy=f"Set {field} to what the run really has.")


def whole(low: int, **numbers: int) -> None:
    """Raises ConfigError for the first number that is no integer of at least `low`."""
    for field, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ConfigError(field, value=value, allowed=f"a whole number of at least {low}",
                              remedy=f"Set {field} to what the run really has.")


def fraction(**numbers: float) -> None:
    """Raises ConfigError for the first number outside (0, 1]."""
    for field, value in numbers.items():
        at_least(0, strictly=True, **{field: value})
        if value > 1:
            raise ConfigError(field, value=value, allowed="a share, above 0 and at most 1", remedy=f"Give {field} as 0.5, not as 50.")


def named(field: str, name: str, table: dict[str, object], *, remedy: str) -> None:
    """Raises ConfigError unless the table has the name."""
    if name not in table:
        raise ConfigError(field, value=name, allowed=f"one of {', '.join(table)}", remedy=remedy)
