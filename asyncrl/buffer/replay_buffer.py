"""The replay buffer: slots are admitted, filled, taken as whole groups, and freed when the engines have caught up.

    admit ──▶ generating ──complete──▶ ready ──take──▶ taken ──trained──▶ ──acknowledge──▶ slot free
                  │                      │
                  └──────── drop ────────┴──▶ slot free at once, the reason counted

It decides nothing itself: a `SlotTable` does, by its policy; here are what is stored, the accounts and the waiting. All state
changes are synchronous, only `admit` and `take` wait. It belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Any

from asyncrl.accounting import Count, Ledger, total
from asyncrl.buffer.config import BufferConfig, buffer_config, make_depth, make_policy
from asyncrl.buffer.diagnosis import starved_message
from asyncrl.buffer.filters import is_zero_variance, reward_histogram, valid_rewards
from asyncrl.buffer.groups import LateRollouts, StoredGroup
from asyncrl.buffer.recorder import Recorder
from asyncrl.buffer.slot_table import SlotTable
from asyncrl.buffer.staleness import mask_older
from asyncrl.buffer.stats import BufferStats
from asyncrl.buffer.view import BufferView, Missing, Slot, SlotState
from asyncrl.clock import now_s
from asyncrl.errors import BufferStarved, LedgerError, RunAborted, StalenessError
from asyncrl.metrics import Metrics
from asyncrl.types import NOT_SAMPLED, Batch, Prompt, Rollout

TOO_STALE = "too_stale"
"""Why a group is dropped that the policy does not let into a batch any more."""


class ReplayBuffer:
    """Takes a BufferConfig, or its fields by keyword: `ReplayBuffer(groups_per_step=32, group_size=16, max_staleness=2)`.

    `publish_every_steps`, `version`, `ledger` and `recorder` are those of `attach`. Raises ConfigError.
    """

    def __init__(self, config: BufferConfig | None = None, /, *, publish_every_steps: int = 1, version: int = 0,
                 ledger: Ledger | None = None, recorder: Recorder | None = None, **settings: Any) -> None:
        if config is not None and settings:
            raise TypeError(f"give a BufferConfig or its fields, not both: {sorted(settings)}")
        self.config = buffer_config(**settings) if config is None else config
        self._table: SlotTable | None = None
        self.attach(publish_every_steps=publish_every_steps, version=version, ledger=ledger, recorder=recorder)

    def attach(self, *, publish_every_steps: int = 1, version: int = 0, ledger: Ledger | None = None,
               recorder: Recorder | None = None) -> None:
        """Fit an unused buffer into a run: how often weights are published, the version it starts or resumes at, its accounts.

        Without a ledger, or a recorder, that account is not kept. With a ledger, each rollout must have been announced to it by
        `Ledger.generated` before it is completed. Forgets engines. Raises ConfigError; RuntimeError after the first admission.
        """
        if self._table is not None and self._table.next_group_id:
            raise RuntimeError("attach() comes before the first admission")
        self.policy = make_policy(self.config, publish_every_steps=publish_every_steps, start_version=version)
        depth = make_depth(self.config, self.policy, publish_every_steps=publish_every_steps)
        self._table = SlotTable(self.policy, depth, version=version)
        self._least_groups = min(publish_every_steps * self.config.groups_per_step, self.policy.capacity_groups)
        self._ledger, self._recorder = ledger, recorder
        self._stored: dict[int, StoredGroup] = {}
        self._refills: deque[Prompt] = deque()
        self._late = LateRollouts()
        self._batch: Batch | None = None
        self._equal_rewards: list[float] = []
        self._stats = BufferStats()
        self._failure: BaseException | None = None
        self._change = asyncio.Event()
        self._progress_s = 0.0
        self._admitting = 0
        self._admission, self._consumption = asyncio.Lock(), asyncio.Lock()

    @property
    def version(self) -> int:
        """Steps trained so far."""
        return self._table.version

    @property
    def batch_is_out(self) -> bool:
        """Whether a batch was taken and is not trained on yet."""
        return self._batch is not None

    @property
    def ledger(self) -> Ledger | None:
        """Where completions and drops are accounted."""
        return self._ledger

    @property
    def staleness_tokens(self) -> Mapping[int, int]:
        """Tokens taken in the whole run, by staleness."""
        return self._stats.staleness_tokens

    async def admit(self, prompt: Prompt) -> Slot:
        """A slot for one group. Waits for capacity, in order of the calls; woken by drop, acknowledge, fence, and more depth.

        Raises BufferStarved when nothing happens for `stall_timeout_s`, what `fail` was given, and RuntimeError after
        `end_of_data`. Cancelling it is safe.
        """
        if self._table.ended:
            raise RuntimeError("admit() after end_of_data()")
        started_s = now_s()
        self._admitting += 1
        try:
            async with self._admission:
                while self._failure or not self._may_admit(self.view()):
                    await self._next_change("admission waits for a free slot", self._table.generating(), started_s=started_s)
                return self._grant(prompt)
        finally:
            self._admitting -= 1
            self._stats.waited("admission", now_s() - started_s)

    def complete(self, rollout: Rollout) -> None:
        """Add a finished rollout to its group. The last one makes the group ready, or drops it with a reason.

        A rollout of a group that was dropped meanwhile is counted under the same reason. Raises ShapeError, LedgerError or
        NonFiniteError, and stores nothing, for a rollout that is unknown, comes twice, or has no finite reward.
        """
        group = self._stored.get(rollout.group_id)
        if group is None or self._table.get(rollout.group_id).state is not SlotState.GENERATING:
            self._complete_late(rollout)
            return
        group.check(rollout)
        if self._ledger:
            self._ledger.completed(rollout)
        group.add(rollout)
        self._stats.complete(rollout)
        self._progress_s = now_s()
        if not group.missing:
            self._judge(group)

    def drop(self, group_id: int, reason: str) -> bool:
        """Free the slot of a group that is not in a batch. Rollouts of it that still come are counted under `reason`.

        False, and nothing happens, when the group was dropped or taken before. Raises LedgerError for one never admitted.
        """
        if not 0 <= group_id < self._table.next_group_id:
            raise LedgerError(f"group {group_id} was never admitted")
        slot = self._table.get(group_id)
        if slot is None or slot.state is SlotState.TAKEN:
            return False
        self._discard(group_id, reason)
        return True

    def end_of_data(self) -> None:
        """No prompt will be admitted any more: `take` gives the batches that are left, then None."""
        self._table.ended = True
        self._changed()

    def drop_all(self, reason: str) -> None:
        """End with an empty buffer: drop every group, one that is out in a batch included."""
        self._batch = None
        for group_id in tuple(self._stored):
            self._discard(group_id, reason)

    async def take(self) -> Batch | None:
        """The next batch: P whole groups in order of admission, staleness checked. Waits for groups; woken by complete and drop.

        Groups that the policy lets into no batch any more are dropped first, and their prompts are `refills`.

        None after `end_of_data`, when no whole batch is left; fewer groups than P stay stored. Raises BufferStarved naming the
        missing groups when nothing happens for `stall_timeout_s`, what `fail` was given, and RuntimeError while the last batch
        is not `trained`. Cancelling it is safe.
        """
        started_s, waited, deepened = now_s(), False, False
        async with self._consumption:
            if self._batch is not None:
                raise RuntimeError(f"the batch of version {self._batch.version} is out: call trained() before the next take()")
            try:
                while self._failure or isinstance(chosen := self._select(), Missing):
                    if self._table.ended and not self._failure and not self._table.generating():
                        return None
                    if not deepened and self._depth_holds_admission():
                        self._table.depth, deepened = self._table.depth.deeper(), True
                        self._changed()
                    waited = True
                    missing = () if self._failure else chosen.group_ids
                    await self._next_change("the trainer waits for a batch", missing, started_s=started_s)
            finally:
                self._stats.waited("trainer", now_s() - started_s)
            batch, left_over = self._hand_out(chosen)
            self._table.depth = self._table.depth.after_take(waited=waited, left_over_groups=left_over)
            return batch

    def trained(self, batch: Batch) -> None:
        """The step on the batch that was taken last is done: version + 1. Raises StalenessError for any other batch."""
        out = self._batch
        if out is None or (batch.version, [g.group_id for g in batch.groups]) != (out.version, [g.group_id for g in out.groups]):
            raise StalenessError(f"trained() got a batch of version {batch.version}; "
                                 + (f"the one taken has version {out.version}" if out else "none is taken"))
        for group in batch.groups:
            del self._stored[group.group_id]
        self._batch = None
        self._table.train()
        self._stats.train(batch)
        self._changed()

    def add_engine(self, name: str, version: int) -> None:
        """An engine that holds `version`. It serves once it holds the newest version any engine has. Raises StalenessError."""
        self._table.add_engine(name, version)
        self._changed()

    def acknowledge(self, name: str, version: int) -> None:
        """The engine has applied `version`. Raises StalenessError when that is lower than before, or not trained yet."""
        self._table.acknowledge(name, version)
        self._changed()

    def fence(self, name: str) -> None:
        """The engine gets no requests, its running ones are stopped; it holds no slot back. It serves again as in `add_engine`."""
        self._table.fence(name)
        self._changed()

    def fail(self, exception: BaseException) -> None:
        """Every wait, now and later, raises this. The first failure stays."""
        self._failure = self._failure or exception
        self._change.set()

    def view(self) -> BufferView:
        """The state as policies see it."""
        return self._table.view()

    def held(self) -> Count:
        """Tokens and rollouts stored, batch in training included, counted from the rollouts themselves: the ledger's `buffered`."""
        return total([group.count for group in self._stored.values()])

    def unfinished(self) -> tuple[Prompt, ...]:
        """Prompts of the groups that are neither trained on nor gone, in order of admission; of those in a batch that is out, too.

        Last those of `refills` that nobody has asked for.
        """
        return (*(group.slot.prompt for group in self._stored.values()), *self._refills)

    def refills(self) -> tuple[Prompt, ...]:
        """Prompts to admit once more, because what was written for them grew too old; each is given once. None after `end_of_data`."""
        given, self._refills = tuple(self._refills), deque()
        return given

    def state(self) -> dict[str, Any]:
        """What outlives the process: counters and depth, not the groups. msgpack can carry it; `restore` takes it."""
        return {"next_group_id": self._table.next_group_id, "depth_groups": self._table.depth.groups, "stats": self._stats.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on counting from a `state`; after `attach`, before the first admission."""
        self._table.next_group_id = state["next_group_id"]
        self._table.depth = self._table.depth.at(state["depth_groups"])
        self._stats = BufferStats(state["stats"])

    def metrics(self) -> Metrics:
        """What happened since the last call, and the gauges as they stand."""
        return self._stats.drain({"depth": self._table.depth.groups, "held": len(self._table), "ready": self._table.num_ready,
                                  "bytes": self._bytes})

    @property
    def _bytes(self) -> int:
        return sum(group.bytes for group in self._stored.values())

    def _may_admit(self, view: BufferView) -> bool:
        if not self.policy.admit(view):
            return False
        limit = self.config.max_bytes
        return limit is None or len(view.slots) < self._least_groups or self._bytes < limit

    def _depth_holds_admission(self) -> bool:
        if not self._admitting or not self._table.depth_holds_admission():
            return False
        return self._may_admit(self._table.at_capacity(self.view()))

    def _grant(self, prompt: Prompt) -> Slot:
        held = self._table.grant()
        slot = Slot(held.group_id, prompt, held.policy_version)
        self._stored[slot.group_id] = StoredGroup(slot, self.config.group_size, now_s())
        if self._recorder:
            self._recorder.admitted(slot)
        self._progress_s = now_s()
        return slot

    def _discard(self, group_id: int, reason: str) -> None:
        group = self._stored.pop(group_id)
        self._table.discard(group_id)
        self._late.expect(group, reason)
        self._account_drop(reason, group.count, groups=1)
        if self._recorder:
            self._recorder.dropped(group_id, reason)
        self._changed()

    def _judge(self, group: StoredGroup) -> None:
        """A whole group: ready, or dropped."""
        rewards = valid_rewards(group.rollouts.values())
        if len(rewards) < self.config.least_valid_rollouts:
            self._discard(group.slot.group_id, "too_few_valid")
            return
        is_equal = is_zero_variance(rewards, tolerance=self.config.zero_variance_tolerance)
        self._stats.zero_variance(is_equal)
        if is_equal and self.config.zero_variance == "drop":
            self._stats.rewarded(group.rollouts.values())
            self._discard(group.slot.group_id, "zero_variance")
            self._count_empty(rewards[0])
            return
        self._equal_rewards.clear()
        versions = [rollout.first_version for rollout in group.rollouts.values() if rollout.first_version != NOT_SAMPLED]
        self._table.fill(group.slot.group_id, oldest_version=min(versions, default=None))
        if self._recorder:
            self._recorder.scored(group.build())
        self._changed()

    def _count_empty(self, reward: float) -> None:
        self._equal_rewards.append(reward)
        fills = len(self._equal_rewards) / self.config.groups_per_step
        if fills >= self.config.max_empty_fills:
            self.fail(RunAborted(f"buffer.max_empty_fills: {len(self._equal_rewards)} groups in a row ({fills:.6g} batches) had equal "
                                 f"rewards and were dropped ({reward_histogram(self._equal_rewards)}). The prompts are too hard or too "
                                 f"easy for this policy, or the reward cannot tell answers apart; zero_variance='keep' keeps them."))

    def _complete_late(self, rollout: Rollout) -> None:
        reason = self._late.settle(rollout)
        if reason is None:
            known = "is complete, taken or gone" if 0 <= rollout.group_id < self._table.next_group_id else "was never admitted"
            raise LedgerError(f"rollout {rollout.index} of group {rollout.group_id} cannot be completed: the group {known}")
        if self._ledger:
            self._ledger.completed(rollout)
        self._account_drop(reason, Count(rollout.num_tokens, 1), groups=0)

    def _account_drop(self, reason: str, dropped: Count, *, groups: int) -> None:
        self._stats.drop(reason, dropped, groups=groups)
        if self._ledger:
            self._ledger.dropped(reason, tokens=dropped.tokens, rollouts=dropped.rollouts)

    def _select(self) -> tuple[int, ...] | Missing:
        for group_id in () if self._batch else self._table.expired():
            prompt = self._stored[group_id].slot.prompt
            self._discard(group_id, TOO_STALE)
            if not self._table.ended:
                self._refills.append(prompt)
        return self._table.select()

    def _hand_out(self, chosen: tuple[int, ...]) -> tuple[Batch, int]:
        """The batch, and how many ready groups are left over."""
        taken = Batch(self.version, tuple(self._stored[group_id].build() for group_id in chosen))
        batch = mask_older(taken, least_version=self.policy.oldest_trained(self.version))
        self.policy.check(batch, self.version)
        left_over = self._table.hand_out(chosen)
        self._batch = batch
        self._stats.take(batch, bound=self.config.max_staleness)
        self._stats.mask(taken, batch)
        self._changed()
        return batch, left_over

    def _changed(self) -> None:
        """Wake whoever waits."""
        self._progress_s = now_s()
        self._change.set()
        self._change = asyncio.Event()

    async def _next_change(self, waits_for: str, missing: tuple[int, ...], *, started_s: float) -> None:
        """Returns at the next change, or early. Raises the failure, or BufferStarved once nothing has changed for too long."""
        if self._failure:
            raise self._failure
        timeout_s = self.config.stall_timeout_s
        since_s = max(started_s, self._progress_s)
        if now_s() - since_s >= timeout_s:
            raise BufferStarved(starved_message(self.view(), self._stored, waits_for=waits_for, missing=missing, now_s=now_s(),
                                                stalled_s=timeout_s))
        change = self._change
        try:
            async with asyncio.timeout_at(since_s + timeout_s):
                await change.wait()
        except TimeoutError:
            return
