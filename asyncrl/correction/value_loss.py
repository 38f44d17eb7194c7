"""What a critic minimises, per token."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.errors import ConfigError, ShapeError


@dataclass(frozen=True, slots=True, eq=False)
class ValueLoss:
    """Of P tokens."""

    losses: Tensor
    """[P] with gradient."""
    clipped: Tensor
    """[P] bool, held by the clip: their gradient is 0."""


def value_loss(values: Tensor, *, old_values: Tensor, returns: Tensor, clip: float | None = 0.2) -> ValueLoss:
    """loss_t = ½ max((V − R)², (V_old + clamp(V − V_old, ±clip) − R)²), in the form of OpenAI's baselines, TRL and verl.

    The clip holds a value that leaves [V_old ± clip] towards its return; one that leaves it the other way is drawn back. PPO's paper,
    1707.06347, has no such clip. None: ½ (V − R)².

    Args:
        values: [P] float, current, with gradient.
        old_values: [P] before the step; detached here, as is
        returns: [P] what the values should have been.
        clip: above 0, in units of reward.

    Raises ShapeError, ConfigError.
    """
    if not values.shape == old_values.shape == returns.shape or values.dim() != 1:
        raise ShapeError(f"values, old_values and returns must be [P], got {tuple(values.shape)}, {tuple(old_values.shape)}, "
                         f"{tuple(returns.shape)}")
    if clip is not None and not 0.0 < clip < math.inf:
        raise ConfigError("advantages.critic.value_clip", value=clip, allowed="a finite number above 0, or none",
                          remedy="It is a distance between values, in units of reward.")
    returns, old_values = returns.detach(), old_values.detach()
    squares = (values - returns).square()
    if clip is None:
        return ValueLoss(losses=0.5 * squares, clipped=torch.zeros_like(values, dtype=torch.bool))
    held = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
    return ValueLoss(losses=0.5 * torch.maximum(squares, held), clipped=held.detach() > squares.detach())
