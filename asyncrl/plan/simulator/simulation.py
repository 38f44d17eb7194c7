"""The events of a run, and the real buffer's slot table between them.

    admit ──▶ queue ──▶ instance ──ends──▶ group whole ──▶ take ──▶ trained ──▶ update of the engines ──▶ slots free ──▶ admit

Nothing here decides who may start, which groups make a batch, or what is too old: `asyncrl.buffer.slot_table` does, as in a run.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

import numpy as np

from asyncrl.buffer.config import make_depth, make_policy
from asyncrl.buffer.slot_table import SlotTable
from asyncrl.buffer.view import Missing
from asyncrl.plan.simulator.instance import Answer, Instance
from asyncrl.plan.simulator.result import Clocks, Simulated, Tally, simulated
from asyncrl.plan.simulator.scenario import Scenario

_DRAWN_GROUPS = 1024
"""Lengths are drawn for so many groups at once."""


class _Group:
    """A group that holds a slot."""

    __slots__ = ("answers", "group_id", "left")

    def __init__(self, group_id: int, lengths: list[int]) -> None:
        self.group_id, self.left = group_id, len(lengths)
        self.answers = [Answer(self, length) for length in lengths]

    @property
    def oldest_version(self) -> int:
        """Of the first tokens of its answers."""
        return min(answer.spans[0][0] for answer in self.answers)


def simulate(scenario: Scenario) -> Simulated:
    """Run the scenario to its last step. The same seed gives the same numbers."""
    return Simulation(scenario).run()


class Simulation:
    """One run on a virtual clock."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        every = scenario.updates.publish_every_steps
        self.policy = make_policy(scenario.buffer, publish_every_steps=every)
        self.table = SlotTable(self.policy, make_depth(scenario.buffer, self.policy, publish_every_steps=every))
        self.instances = [Instance(f"engine-{n}", scenario.decoder, version=0, prompt_tokens=scenario.prompt_tokens)
                          for n in range(scenario.engines)]
        for instance in self.instances:
            self.table.add_engine(instance.name, 0)
        self.tally, self.clocks = Tally(), Clocks()
        self.published = 0
        self._rng = np.random.default_rng(scenario.seed)
        self._failing = np.random.default_rng([scenario.seed, 1])
        self._lengths: deque[list[int]] = deque()
        self._long_tokens = 2 * scenario.lengths.mean_tokens
        self._queue: deque[Answer] = deque()
        self._groups: dict[int, _Group] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._batch: tuple[int, ...] | None = None
        self._blocked_by: set[int] = set()
        self._unjudged: list[int] = []
        """Groups that became whole since `_select` last looked."""
        self._waited = self._deepened = False
        self._began = Clocks()

    def run(self) -> Simulated:
        """To the end of the last step."""
        if self.scenario.failures:
            for instance in self.instances:
                self._plan_failure(instance)
        self._admit()
        self._take()
        while self.table.version < self.scenario.steps:
            self.clocks.now_s, _, act = heapq.heappop(self._events)
            act()
        return simulated(self.tally, self._measured().since(self._began), engines=self.scenario.engines)

    def _at(self, when_s: float, act: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (when_s, self._order, act))

    def _measured(self) -> Clocks:
        """Steps that are under way count as far as they have come: the engines' clocks lie at most a step apart."""
        now = self.clocks
        return Clocks(now.now_s, now.trainer_busy_s, sum(i.decode_s for i in self.instances), sum(i.prefill_s for i in self.instances),
                      sum(i.paused_s for i in self.instances), now.reprefill_tokens, now.preemptions, now.failures)

    # --- admission and dispatch ---

    def _admit(self) -> None:
        admissible = self.table.admissible()
        for _ in range(admissible):
            if not self._lengths:
                drawn = self.scenario.lengths.sample(self._rng, groups=_DRAWN_GROUPS, group_size=self.scenario.buffer.group_size,
                                                     correlation=self.scenario.group_correlation)
                self._lengths.extend(drawn.tolist())
            group = _Group(self.table.grant().group_id, self._lengths.popleft())
            self._groups[group.group_id] = group
            self._queue.extend(group.answers)
        if admissible:
            self._dispatch()

    def _dispatch(self) -> None:
        """Whoever waits goes where the fewest run, while somebody has room."""
        now_s = self.clocks.now_s
        loads = [(instance.running, n) for n, instance in enumerate(self.instances) if not instance.is_down and not instance.draining]
        heapq.heapify(loads)
        touched = set()
        while self._queue and loads:
            n = loads[0][1]
            instance = self.instances[n]
            if n not in touched:
                self._reach(instance)
            if not instance.has_room(self._queue[0]):
                heapq.heappop(loads)
                continue
            touched.add(n)
            self._join(instance, self._queue.popleft(), now_s=now_s)
            heapq.heapreplace(loads, (instance.running, n))
        for n in touched:
            self._plan(self.instances[n])

    def _join(self, instance: Instance, answer: Answer, *, now_s: float) -> None:
        """A prompt is computed once for its group; what was computed before and lost, once more."""
        prompt_tokens = self.scenario.prompt_tokens
        if answer.done:
            self.clocks.reprefill_tokens += prompt_tokens + answer.done
            instance.join(answer, now_s=now_s, prefill_tokens=prompt_tokens + answer.done)
        else:
            instance.join(answer, now_s=now_s, prefill_tokens=prompt_tokens / self.scenario.buffer.group_size)

    # --- instances ---

    def _plan(self, instance: Instance) -> None:
        instance.epoch += 1
        when_s = instance.next_event_s()
        if when_s is not None:
            epoch = instance.epoch
            self._at(when_s, lambda: self._happened(instance, epoch))

    def _happened(self, instance: Instance, epoch: int) -> None:
        if epoch == instance.epoch:
            self._settle(instance)
            self._plan(instance)

    def _reach(self, instance: Instance) -> None:
        """Bring an instance to this moment; what ends just then has ended."""
        while (when_s := instance.next_event_s()) is not None and when_s <= self.clocks.now_s:
            self._settle(instance)
        instance.reach(self.clocks.now_s)

    def _settle(self, instance: Instance) -> None:
        """Its next event: answers end, or the youngest makes room."""
        ended = instance.reach_event()
        if not ended:
            self.clocks.preemptions += 1
            self._queue.appendleft(instance.evict_youngest())
            return
        while self._queue and instance.has_room(self._queue[0]):
            self._join(instance, self._queue.popleft(), now_s=self.clocks.now_s)
        if instance.draining and not instance.running:
            self._at(instance.clock_s, lambda: self._apply(instance))
        for answer in ended:
            self._finish(answer.group)

    def _finish(self, group: _Group) -> None:
        group.left -= 1
        if not group.left:
            self.table.fill(group.group_id, oldest_version=group.oldest_version)
            self._blocked_by.discard(group.group_id)
            self._unjudged.append(group.group_id)
            # at a time of its own: whoever calls may be in the middle of moving an instance
            self._at(self.clocks.now_s, self._select)

    # --- trainer ---

    def _take(self) -> None:
        """The trainer asks for a batch."""
        self._waited = self._deepened = False
        self._blocked_by.clear()
        self._unjudged = list(self.table.expired())
        self._select()

    def _drop(self, group_ids: tuple[int, ...]) -> None:
        for group_id in group_ids:
            self.table.discard(group_id)
            self.tally.drop(self._groups.pop(group_id).answers, long_tokens=self._long_tokens)
        if group_ids:
            self._admit()

    def _select(self) -> None:
        """Select once it can succeed: with P whole groups, and none of those missing that the policy named last.

        Ages change with the version alone, so between two steps only groups that became whole are judged.
        """
        if self._batch is not None:
            return
        while self._unjudged:
            judged, self._unjudged = self._unjudged, []
            self._drop(tuple(group_id for group_id in judged if self.table.is_expired(group_id)))
        chosen: tuple[int, ...] | Missing = Missing(())
        if self.table.num_ready >= self.policy.groups_per_step and not self._blocked_by:
            chosen = self.table.select()
        if isinstance(chosen, Missing):
            self._waited = True
            self._blocked_by = set(chosen.group_ids) or self._blocked_by
            self._deepen()
            return
        left_over = self.table.hand_out(chosen)
        self.table.depth = self.table.depth.after_take(waited=self._waited, left_over_groups=left_over)
        self._batch = chosen
        answers = [answer for group_id in chosen for answer in self._groups.pop(group_id).answers]
        version = self.table.version
        if version >= self.scenario.warm_up_steps:
            self.tally.train(answers, version=version, oldest_trained=self.policy.oldest_trained(version),
                             bound=self.scenario.buffer.max_staleness, long_tokens=self._long_tokens)
        tokens = sum(answer.length for answer in answers) + self.scenario.prompt_tokens * len(answers)
        step_s = self.scenario.trainer.fixed_s + tokens * self.scenario.trainer.s_per_token
        self._at(self.clocks.now_s + step_s, lambda: self._trained(step_s))

    def _deepen(self) -> None:
        if not self._deepened and self.table.depth.step_groups and self.table.depth_holds_admission():
            self.table.depth, self._deepened = self.table.depth.deeper(), True
            self._admit()

    def _trained(self, step_s: float) -> None:
        self.clocks.trainer_busy_s += step_s
        self._batch = None
        self.table.train()
        if self.table.version == self.scenario.warm_up_steps:
            self._began, self.tally = self._measured(), Tally()
        if self.table.version % self.scenario.updates.publish_every_steps == 0:
            self._publish()
        if self.table.version < self.scenario.steps:
            self._take()

    # --- weight updates and failures ---

    def _publish(self) -> None:
        self.published = version = self.table.version
        if self.scenario.updates.interruption == "drain":
            for instance in self.instances:
                instance.draining = not instance.is_down
                if instance.draining and not instance.running:
                    self._apply(instance)
            return
        done_s = self.clocks.now_s
        for instance in self.instances:
            if instance.is_down:
                continue
            self._reach(instance)
            self._update(instance)
            done_s = max(done_s, instance.clock_s)
            self._plan(instance)
        self._at(done_s, lambda: self._acknowledged([i for i in self.instances if not i.is_down and i.version >= version]))

    def _update(self, instance: Instance) -> None:
        instance.pause(self.scenario.updates.stall_s)
        instance.update(self.published)
        if self.scenario.updates.interruption == "recompute":
            self.clocks.reprefill_tokens += instance.recompute()

    def _apply(self, instance: Instance) -> None:
        """A drained instance takes the newest version."""
        if instance.draining and not instance.running:
            instance.draining = False
            instance.reach(self.clocks.now_s)
            self._update(instance)
            self._at(instance.clock_s, lambda: self._acknowledged([instance]))

    def _acknowledged(self, instances: list[Instance]) -> None:
        for instance in instances:
            if not instance.is_down:
                self.table.acknowledge(instance.name, instance.version)
        self._admit()
        self._dispatch()
        self._select()

    def _plan_failure(self, instance: Instance) -> None:
        in_s = float(self._failing.exponential(self.scenario.failures.mean_s_between))
        self._at(self.clocks.now_s + in_s, lambda: self._fail(instance))

    def _fail(self, instance: Instance) -> None:
        """What it wrote goes on elsewhere, first of all that waits."""
        self._reach(instance)
        instance.is_down, instance.draining = True, False
        instance.epoch += 1
        self._queue.extendleft(reversed(instance.evict_all()))
        self.clocks.failures += 1
        self.table.fence(instance.name)
        self._at(self.clocks.now_s + self.scenario.failures.restart_s, lambda: self._restart(instance))
        self._admit()
        self._dispatch()

    def _restart(self, instance: Instance) -> None:
        instance.is_down = False
        instance.clock_s = max(instance.clock_s, self.clocks.now_s)
        instance.update(self.published)
        self.table.add_engine(instance.name, self.published)
        self._plan_failure(instance)
        self._admit()
        self._dispatch()
