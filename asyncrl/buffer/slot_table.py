"""Everything the buffer decides, and nothing it stores: slots, versions, engines, depth.

Synchronous and without a clock. `ReplayBuffer` puts rollouts, accounts and waiting round it; the simulator drives the same
table on a virtual clock, so what a policy does there is what it does in a run.
"""

from __future__ import annotations

import dataclasses

from asyncrl.buffer.depth import Depth
from asyncrl.buffer.fleet import Fleet
from asyncrl.buffer.policies import Policy
from asyncrl.buffer.selection import overtake
from asyncrl.buffer.view import BufferView, Missing, SlotState, SlotView


class SlotTable:
    """The slots of one run, from admission until the engines have caught up. `policy` makes every choice."""

    def __init__(self, policy: Policy, depth: Depth, *, version: int = 0) -> None:
        self.policy, self.depth = policy, depth
        self.fleet = Fleet(version=version)
        self.next_group_id = 0
        self.ended = False
        self._version = version
        self._slots: dict[int, SlotView] = {}
        self._ready: set[int] = set()
        self._released = version

    def __len__(self) -> int:
        """Slots held."""
        return len(self._slots)

    @property
    def version(self) -> int:
        """Steps trained so far."""
        return self._version

    @property
    def num_ready(self) -> int:
        """Groups that may be taken."""
        return len(self._ready)

    def view(self) -> BufferView:
        """The state as policies see it."""
        return BufferView(version=self._version, served_version=self.fleet.served_version, depth_groups=self.depth.groups,
                          slots=tuple(self._slots.values()), engines=self.fleet.engines, ended=self.ended)

    def get(self, group_id: int) -> SlotView | None:
        """The slot of a group, None when it holds none."""
        return self._slots.get(group_id)

    def generating(self) -> tuple[int, ...]:
        """Groups that are not whole, in order of admission."""
        return tuple(slot.group_id for slot in self._slots.values() if slot.state is SlotState.GENERATING)

    def admissible(self) -> int:
        """How many groups may start now."""
        return self.policy.admit(self.view())

    def grant(self) -> SlotView:
        """A slot for one more group; whoever asks has looked at `admissible`."""
        slot = SlotView(self.next_group_id, self.fleet.served_version)
        self.next_group_id += 1
        self._slots[slot.group_id] = slot
        return slot

    def fill(self, group_id: int, *, oldest_version: int | None) -> None:
        """The group is whole and may be taken; `oldest_version` wrote its oldest token, None when it has none."""
        self._slots[group_id] = dataclasses.replace(self._slots[group_id], state=SlotState.READY, oldest_version=oldest_version)
        self._ready.add(group_id)

    def discard(self, group_id: int) -> None:
        """Free the slot of a group that will not be trained on."""
        del self._slots[group_id]
        self._ready.discard(group_id)

    def expired(self) -> tuple[int, ...]:
        """Whole groups that the next step may not train on: to be discarded before `select`."""
        return tuple(group_id for group_id in sorted(self._ready) if self.is_expired(group_id))

    def is_expired(self, group_id: int) -> bool:
        """Whether the next step may not train on this whole group."""
        return self.policy.is_expired(self._slots[group_id], self._version)

    def select(self) -> tuple[int, ...] | Missing:
        """Groups of the next batch, or what it waits for."""
        return self.policy.select(self.view())

    def hand_out(self, chosen: tuple[int, ...]) -> int:
        """The chosen groups are in a batch. Gives how many ready groups are left over."""
        for waiting in overtake(tuple(self._slots.values()), chosen):
            self._slots[waiting.group_id] = waiting
        for group_id in chosen:
            self._slots[group_id] = dataclasses.replace(self._slots[group_id], state=SlotState.TAKEN, batch_version=self._version)
        self._ready.difference_update(chosen)
        return len(self._ready)

    def train(self) -> None:
        """A step was made on the batch that is out."""
        self._version += 1

    def depth_holds_admission(self) -> bool:
        """Whether more could start if depth were all that the bound allows, and nothing can start now."""
        view = self.view()
        return not self.policy.admit(view) and bool(self.policy.admit(self.at_capacity(view)))

    def at_capacity(self, view: BufferView) -> BufferView:
        """The view of a run that wants all the depth it may have."""
        return dataclasses.replace(view, depth_groups=self.policy.capacity_groups)

    def add_engine(self, name: str, version: int) -> None:
        """An engine that holds `version`. It serves once it holds the newest version any engine has. Raises StalenessError."""
        self.fleet.add(name, version, trainer_version=self._version)
        self._release()

    def acknowledge(self, name: str, version: int) -> None:
        """The engine has applied `version`. Raises StalenessError when that is lower than before, or not trained yet."""
        self.fleet.acknowledge(name, version, trainer_version=self._version)
        self._release()

    def fence(self, name: str) -> None:
        """The engine gets no requests and holds no slot back."""
        self.fleet.fence(name)
        self._release()

    def _release(self) -> None:
        served = self.fleet.served_version
        if served == self._released:
            return
        self._released = served
        free = [slot.group_id for slot in self._slots.values() if slot.batch_version is not None and slot.batch_version < served]
        for group_id in free:
            del self._slots[group_id]
