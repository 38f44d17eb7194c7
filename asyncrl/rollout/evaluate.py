"""Rollouts outside the buffer: all at once, in order, or the first cause why not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as SequenceOf

from asyncrl.clock import now_s
from asyncrl.errors import RunAborted
from asyncrl.rollout.worker import RolloutWorker
from asyncrl.types import Prompt, Rollout


async def roll_out_all(worker: RolloutWorker, prompts: SequenceOf[Prompt], *, group_id: int, stall_timeout_s: float) -> list[Rollout]:
    """One rollout a prompt, all at once. `group_id` is negative, so that no group of the buffer is meant.

    Raises RunAborted, naming the prompts, when none has ended for `stall_timeout_s`.
    """
    started: list[asyncio.Task[Rollout]] = []

    async def one(index: int) -> Rollout:
        rollout = await worker.run(prompts[index], group_id=group_id, index=index)
        if not limit.expired():
            limit.reschedule(now_s() + stall_timeout_s)
        return rollout

    try:
        async with asyncio.timeout(stall_timeout_s) as limit, asyncio.TaskGroup() as tasks:
            started += [tasks.create_task(one(index)) for index in range(len(prompts))]
    except TimeoutError:
        open_ids = [prompt.prompt_id for prompt, task in zip(prompts, started, strict=True) if task.cancelled()]
        raise RunAborted(f"{len(open_ids)} of {len(prompts)} rollouts outside the buffer have not ended, and none has for "
                         f"{stall_timeout_s:g} s; among them {open_ids[:8]}. See the engine's log, or raise "
                         "buffer.stall_timeout_s.") from None
    except BaseExceptionGroup as failures:
        raise first_failure(failures) from None
    return [task.result() for task in started]


def first_failure(error: BaseException) -> BaseException:
    """The first error inside nested groups: one cause, not a page of siblings that were cancelled with it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
