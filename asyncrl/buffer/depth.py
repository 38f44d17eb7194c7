"""How far ahead the run works, inside what the bound allows."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

_CALM_TAKES = 4
"""Takes in a row without waiting before depth shrinks: after fewer, a batch of short answers alone would be followed by a wait."""


@dataclass(frozen=True, slots=True)
class Depth:
    """Slots the run wants to hold at once, counted like the capacity: until engines have the weights trained on them.

    The bound is a promise, not an operating point: where engines outrun the trainer, a full buffer only makes every token
    older. `auto` grows by `step_groups` when the trainer waits for want of depth. When several takes in a row neither waited
    nor used up what was ready, half of what was left over each time is given up.
    """

    groups: int
    least_groups: int
    most_groups: int
    step_groups: int
    """0: fixed."""
    calm_takes: int = 0
    """Takes in a row that did not wait."""
    spare_groups: int = 0
    """Ready groups that each of them left over."""

    @classmethod
    def auto(cls, *, groups_per_step: int, least_groups: int, most_groups: int) -> Depth:
        """Starts with one batch more than the least: one is generated while one is trained. Eight moves up make a batch."""
        return cls(min(most_groups, least_groups + groups_per_step), least_groups, most_groups, step_groups=-(-groups_per_step // 8))

    @classmethod
    def fixed(cls, groups: int) -> Depth:
        """Never moves."""
        return cls(groups, groups, groups, step_groups=0)

    def at(self, groups: int) -> Depth:
        """At the depth of an earlier process, as far as it may move there."""
        return dataclasses.replace(self, groups=min(self.most_groups, max(self.least_groups, groups))) if self.step_groups else self

    def deeper(self) -> Depth:
        """During a take that waits while only depth holds admission back."""
        return dataclasses.replace(self, groups=min(self.most_groups, self.groups + self.step_groups))

    def after_take(self, *, waited: bool, left_over_groups: int) -> Depth:
        """After a take that left so many ready groups over."""
        if waited:
            return dataclasses.replace(self, calm_takes=0, spare_groups=0)
        spare = min(self.spare_groups, left_over_groups) if self.calm_takes else left_over_groups
        if self.calm_takes + 1 < _CALM_TAKES:
            return dataclasses.replace(self, calm_takes=self.calm_takes + 1, spare_groups=spare)
        given_up = (spare + 1) // 2 if 0 < self.step_groups <= spare else 0
        return dataclasses.replace(self, groups=max(self.least_groups, self.groups - given_up), calm_takes=0, spare_groups=0)
