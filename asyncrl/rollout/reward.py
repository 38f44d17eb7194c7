"""Rewards run in killable workers with a deadline. What goes wrong is an error of that rollout, never a reward of 0."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from asyncrl.channel import MAX_HEADER_BYTES, Message, pack
from asyncrl.connection import Connection
from asyncrl.errors import ChildDied, ConfigError, ProtocolError, RewardError, RewardTimeout, RunAborted
from asyncrl.machine import memory_limit_bytes
from asyncrl.rollout.judge import NamedReward, RewardFunction, named_rewards, serve_rewards
from asyncrl.rollout.zygote import Zygote
from asyncrl.types import Prompt

_MESSAGE_S = 0.01
"""Work a message to a worker should hold: enough to hide the trip, little enough to spread slow rewards over the workers."""
_MESSAGE_ITEMS = 64
_ITEM_BYTES = MAX_HEADER_BYTES // (2 * _MESSAGE_ITEMS)
"""So that a full message stays under the limit of the wire."""
_HANGING_TIMEOUTS = 4
"""So many deadlines, one after another, without one call that ended: nothing will. One would be a slow prompt; a service that is away for
three comes back."""
_SETTLE_S = 1.0
"""Between the end of a worker's socket and the report of its end, in either order."""


class _Item:
    """One rollout to judge."""

    def __init__(self, packed: bytes, result: asyncio.Future[dict[str, float]]) -> None:
        self.packed = packed
        self.result = result
        self.rewards: dict[str, float] = {}
        self.answers = 0
        """Functions that have judged it; one that abstained has no entry in `rewards`."""

    def finish(self) -> None:
        if not self.rewards:
            self.fail(RewardError("each reward function returned None for this rollout: no reward is not a reward of 0"))
        elif not self.result.done():
            self.result.set_result(self.rewards)

    def begin_again(self) -> None:
        self.rewards.clear()
        self.answers = 0

    def fail(self, error: Exception) -> None:
        if not self.result.done():
            self.result.set_exception(error)


class _Worker:
    """A forked worker, the items it holds, and the deadline of the call it is at."""

    def __init__(self) -> None:
        self.id = 0
        self.connection: Connection
        self.items: deque[_Item] = deque()
        self.deadline: asyncio.TimerHandle | None = None
        self.exit_reason: str | None = None

    def stop_clock(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None


class RewardPool:
    """Judges rollouts in workers forked from an early copy of this process, so any callable will do: closures, lambdas, coroutines.

    Args:
        functions: `f(prompt: Prompt, completion: str) -> float` or TRL's `f(prompts, completions, **columns) -> list[float | None]`,
            by name or with their own names. Columns cross as msgpack: tuples become lists, NumPy scalars numbers. In TRL's, prompts
            made of messages are lists of messages, and so are their completions; None leaves that reward out of the sum.
        workers: how many run at once.
        timeout_s: for one call of one function; the worker that misses it is killed and replaced.
        memory_bytes: private memory a worker may allocate beyond what it inherits; None gives it its share of half of this process's
            limit, so that it is the workers who run out.
    """

    def __init__(self, functions: Mapping[str, RewardFunction] | Sequence[RewardFunction], *, workers: int = 2,
                 timeout_s: float = 10.0, memory_bytes: int | None = None) -> None:
        for name, value in (("workers", workers), ("timeout_s", timeout_s), ("memory_bytes", memory_bytes)):
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"reward.{name}", value=value, allowed="a finite number above 0", remedy="Set it, or leave it out.")
        self._rewards: tuple[NamedReward, ...] = named_rewards(functions)
        self._limit = workers
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._zygote: Zygote | None = None
        self._number = 0
        self._queue: deque[_Item] = deque()
        self._workers: set[_Worker] = set()
        self._call_s: float | None = None
        self._timeouts = 0
        self._first_timeout_s = 0.0
        self._closed = False

    def start(self, logs: Path) -> None:
        """Fork the zygote; call it before anything starts threads. Output of the workers goes to `rewards.log`."""
        self.start_together([self], logs)

    @staticmethod
    def start_together(pools: Sequence[RewardPool], logs: Path) -> None:
        """Fork one zygote for several pools, which have workers of their own and are closed together."""
        assert all(pool._zygote is None for pool in pools), "a pool is started once"
        zygote = Zygote.fork(partial(serve_rewards, rewards=[pool._rewards for pool in pools]), log=logs / "rewards.log")
        share_bytes = memory_limit_bytes() // (2 * sum(pool._limit for pool in pools))
        for number, pool in enumerate(pools):
            pool._zygote, pool._number, pool._memory_bytes = zygote, number, pool._memory_bytes or share_bytes

    async def score(self, prompt: Prompt, completion: str, tokens: list[int]) -> dict[str, float]:
        """Reward by name for one rollout. Waits for a worker; a cancelled caller leaves the worker to finish.

        Raises RewardError (raised, returned no finite number, ended its worker, None from all), RewardTimeout, ChildDied without a zygote,
        RunAborted when nothing but deadlines has passed for four of them.
        """
        assert self._zygote is not None, "start() comes first"
        if self._closed:
            raise RewardError("the reward pool is closed")
        item = _Item(_packed(prompt, completion, tokens), asyncio.get_running_loop().create_future())
        self._queue.append(item)
        self._dispatch()
        return await item.result

    async def close(self) -> None:
        """Kill the workers, end the zygote, fail what was not judged. Safe to call twice and before `start`."""
        self._closed = True
        for worker in list(self._workers):
            self._remove(worker)
            self._queue.extend(worker.items)
        for item in self._queue:
            item.fail(RewardError("the reward pool was closed before this rollout was judged"))
        self._queue.clear()
        if self._zygote is not None:
            await self._zygote.close()

    def _dispatch(self) -> None:
        """Hand queued items to workers that have none, forking up to the limit."""
        while self._queue and not self._closed:
            idle = [worker for worker in self._workers if not worker.items]
            free = len(idle) + self._limit - len(self._workers)
            if free == 0:
                return
            items = self._next_items(-(-len(self._queue) // free))
            try:
                if items:
                    self._give(idle[0] if idle else self._fork(), items)
            except ChildDied as error:
                for item in (*items, *self._queue):
                    item.fail(error)
                self._queue.clear()

    def _next_items(self, share: int) -> list[_Item]:
        """Up to a fair share of the queue, and no more than a message should hold."""
        count = 1 if self._call_s is None else int(_MESSAGE_S / max(self._call_s * len(self._rewards), 1e-6))
        items: list[_Item] = []
        while self._queue and len(items) < max(1, min(count, share, _MESSAGE_ITEMS)):
            item = self._queue.popleft()
            if not item.result.done():
                items.append(item)
        return items

    def _give(self, worker: _Worker, items: list[_Item]) -> None:
        worker.items.extend(items)
        worker.connection.send(Message("judge", body={"pool": self._number, "items": [item.packed for item in items]}))
        self._start_clock(worker)

    def _fork(self) -> _Worker:
        worker = _Worker()
        worker.id, sock = self._zygote.spawn(on_exit=lambda reason: self._exited(worker, reason), memory_bytes=self._memory_bytes)
        worker.connection = Connection(sock, on_message=lambda message: self._answered(worker, message),
                                       on_end=lambda error: self._socket_ended(worker, error))
        self._workers.add(worker)
        return worker

    def _start_clock(self, worker: _Worker) -> None:
        worker.stop_clock()
        if worker.items:
            worker.deadline = asyncio.get_running_loop().call_later(self._timeout_s, self._timed_out, worker)

    def _answered(self, worker: _Worker, message: Message) -> None:
        if worker not in self._workers or not worker.items:
            return
        item, answer = worker.items[0], message.body
        if "error" in answer:
            item.fail(RewardError(answer["error"]))
            worker.items.popleft()
            self._timeouts = 0
        else:
            if answer["value"] is not None:
                item.rewards[self._current(item)] = answer["value"]
            item.answers += 1
            self._call_s = answer["seconds"] if self._call_s is None else 0.9 * self._call_s + 0.1 * answer["seconds"]
            if item.answers == len(self._rewards):
                worker.items.popleft()
                item.finish()
                self._timeouts = 0
        self._start_clock(worker)
        self._dispatch()

    def _timed_out(self, worker: _Worker) -> None:
        name = self._current(worker.items[0])
        self._zygote.kill(worker.id)
        now_s = asyncio.get_running_loop().time()
        self._first_timeout_s = self._first_timeout_s if self._timeouts else now_s
        self._timeouts += 1
        error: Exception = RewardTimeout(f"reward {name!r} ran longer than {self._timeout_s:g} s; its worker was killed")
        if self._timeouts >= _HANGING_TIMEOUTS and now_s - self._first_timeout_s >= (_HANGING_TIMEOUTS - 1) * self._timeout_s:
            error = RunAborted(f"no judgement has ended for {_HANGING_TIMEOUTS} times env.timeout_s = {self._timeout_s:g} s: "
                               f"{self._timeouts} calls in a row ran longer, the newest of reward {name!r}. Mend what it waits for, or "
                               "raise env.timeout_s.")
        self._replace(worker, error)

    def _exited(self, worker: _Worker, reason: str) -> None:
        worker.exit_reason = reason
        if worker in self._workers and not worker.connection.closed:
            asyncio.get_running_loop().call_later(_SETTLE_S, self._lost, worker)
        else:
            self._lost(worker)

    def _socket_ended(self, worker: _Worker, error: ProtocolError | None) -> None:
        if worker.exit_reason is not None:
            self._lost(worker)
        else:
            # Reported within the moment, unless the reward closed our socket or wrote on it and goes on.
            asyncio.get_running_loop().call_later(0.0 if error else _SETTLE_S, self._zygote.kill, worker.id)

    def _lost(self, worker: _Worker) -> None:
        if worker not in self._workers:
            return
        if self._zygote.exit_reason is not None:
            self._replace(worker, ChildDied(self._zygote.exit_reason))
        else:
            name = self._current(worker.items[0]) if worker.items else "none"
            self._replace(worker, RewardError(f"reward {name!r} ended its worker: {worker.exit_reason}; output in {self._zygote.log}"))

    def _replace(self, worker: _Worker, error: Exception) -> None:
        """Fail the item the worker was at; the others go back to the head of the queue."""
        self._remove(worker)
        if worker.items:
            worker.items.popleft().fail(error)
        for item in reversed(worker.items):
            item.begin_again()
            self._queue.appendleft(item)
        self._dispatch()

    def _remove(self, worker: _Worker) -> None:
        self._workers.discard(worker)
        worker.stop_clock()
        worker.connection.close()

    def _current(self, item: _Item) -> str:
        """The function that judges the item now."""
        return self._rewards[item.answers].name


def _packed(prompt: Prompt, completion: str, tokens: list[int]) -> bytes:
    """The item as it travels. Raises RewardError naming the column that cannot."""
    try:
        packed = pack({"prompt": prompt.to_wire(), "completion": completion, "tokens": tokens})
    except (TypeError, OverflowError, ValueError):
        for name, value in {**prompt.columns, "messages": prompt.messages}.items():
            try:
                pack({name: value})
            except (TypeError, OverflowError, ValueError) as error:
                raise RewardError(f"column {name!r} of prompt {prompt.prompt_id!r} cannot reach a reward worker: {error}") from error
        raise
    if len(packed) > _ITEM_BYTES:
        raise RewardError(f"prompt {prompt.prompt_id!r} and its completion are {len(packed)} bytes; a reward takes at most {_ITEM_BYTES}")
    return packed
