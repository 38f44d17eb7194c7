"""How far ahead the run works, inside what the bound allows."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Depth:
    """Slots the run wants to hold at once, counted like the capacity: until engines have the weights trained on them.

    The bound is a promise, not an operating point: where engines outrun the trainer, a full buffer only makes every token
    older. `auto` moves by `step_groups` up while the trainer waits for want of depth, and by one down while groups are left
    over; up is faster since a waiting trainer costs more than a little staleness.
    """

    groups: int
    least_groups: int
    most_groups: int
    step_groups: int
    """0: fixed."""

    @classmethod
    def auto(cls, *, groups_per_step: int, least_groups: int, most_groups: int) -> Depth:
        """Starts with one batch more than the least: one is generated while one is trained. Eight moves up make a batch."""
        return cls(min(most_groups, least_groups + groups_per_step), least_groups, most_groups, step_groups=-(-groups_per_step // 8))

    @classmethod
    def fixed(cls, groups: int) -> Depth:
        """Never moves."""
        return cls(groups, groups, groups, step_groups=0)

    def deeper(self) -> Depth:
        """After a take that waited while only depth held admission back."""
        return dataclasses.replace(self, groups=min(self.most_groups, self.groups + self.step_groups))

    def shallower(self) -> Depth:
        """After a take that left ready groups over."""
        return dataclasses.replace(self, groups=max(self.least_groups, self.groups - min(1, self.step_groups)))
