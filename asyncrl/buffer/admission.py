"""How many groups may be outstanding so that no token is ever too old when it is trained on.

Let P groups make a batch, K be the bound and W the window. A group u is admitted while every serving engine holds at
least version m, so all its tokens have version m or newer. Slots of batches m and later are still held at that moment.
Of the groups trained in batches m … b − 1, before u's own batch b, at most B − 1 were admitted before u (they held
slots) and at most W − 1 after u (the window). So (b − m)·P ≤ B − 1 + W − 1, and with B = (K + 1)·P − (W − 1) the
staleness b − m cannot exceed K.
"""

from __future__ import annotations

from asyncrl.errors import ConfigError


def default_window(groups_per_step: int, *, max_staleness: int, publish_every_steps: int) -> int:
    """W = 1 + floor(0.3 · P), or as much of it as the other settings leave room for (1 when `max_staleness` is 0)."""
    room = (max_staleness + 1 - publish_every_steps) * groups_per_step
    return 1 + max(0, min(3 * groups_per_step // 10, room))


def capacity_groups(groups_per_step: int, *, max_staleness: int, window: int, publish_every_steps: int) -> int:
    """B = (K + 1) · P − (W − 1): slots that may be held at once.

    Raises ConfigError unless W − 1 ≤ (K + 1 − k) · P. Fewer slots could not hold the k batches of one publish interval:
    the engines would wait for weights that need a batch which waits for a slot.
    """
    room = (max_staleness + 1 - publish_every_steps) * groups_per_step
    if window - 1 > room:
        raise ConfigError("buffer.window, buffer.max_staleness, weights.publish_every_steps",
                          value=(window, max_staleness, publish_every_steps),
                          allowed="window - 1 <= (max_staleness + 1 - publish_every_steps) * groups_per_step, "
                                  f"which is {room} with groups_per_step = {groups_per_step}",
                          remedy="Allow more staleness, publish more often, or narrow the window.")
    return (max_staleness + 1) * groups_per_step - (window - 1)


def least_depth_groups(groups_per_step: int, *, publish_every_steps: int) -> int:
    """k · P: the batches of one publish interval hold their slots until its end, so with fewer the run stands still."""
    return publish_every_steps * groups_per_step
