"""Rollouts and buffers made by hand for the tests of this folder."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from asyncrl.buffer.replay_buffer import ReplayBuffer
from asyncrl.buffer.view import Slot
from asyncrl.types import Batch, Prompt, Rollout, RolloutGroup, SequenceBuilder, Status


def rollout(group_id: int, index: int, *spans: tuple[int, int], reward: float = 0.0, status: Status = Status.STOP, attempt: int = 0,
            prompt_id: str = "") -> Rollout:
    """A rollout over a two-token prompt; `spans` are (policy version, number of tokens)."""
    builder = SequenceBuilder([1, 2])
    for version, tokens in spans:
        logprobs = np.full(tokens, -0.5, np.float32)
        builder.sampled(np.full(tokens, 7, np.int32), logprobs=logprobs, policy_version=version, kv_fresh=True, turn=0)
    rewards = {} if status.is_error else {"total": reward}
    return Rollout(prompt_id, group_id, index, (builder.build(),), status, rewards, attempt=attempt)


def batch_of(version: int, *token_versions: int) -> Batch:
    """A batch of one group with one rollout, one token of each given version."""
    one = rollout(0, 0, *[(v, 1) for v in token_versions])
    return Batch(version, (RolloutGroup(0, Prompt(), (one,)),))


def make_buffer(**settings: Any) -> ReplayBuffer:
    """P = 2 groups of 2 with K = 1 and one engine at version 0, unless told otherwise."""
    extra = {name: settings.pop(name) for name in ("publish_every_steps", "version", "ledger", "recorder") if name in settings}
    defaults = {"groups_per_step": 2, "group_size": 2, "max_staleness": 1, "depth_groups": "max", "stall_timeout_s": 60.0}
    buffer = ReplayBuffer(**extra, **(defaults | settings))
    buffer.add_engine("e0", extra.get("version", 0))
    return buffer


async def admit_all(buffer: ReplayBuffer, *, most: int = 1000) -> list[Slot]:
    """Admit until the buffer lets nobody in."""
    slots: list[Slot] = []
    while len(slots) < most:
        waiter = asyncio.ensure_future(buffer.admit(Prompt()))
        await settle()
        if not waiter.done():
            waiter.cancel()
            await asyncio.gather(waiter, return_exceptions=True)
            break
        slots.append(waiter.result())
    return slots


def complete_group(buffer: ReplayBuffer, group_id: int, *, version: int, rewards: tuple[float, ...] = (0.0, 1.0)) -> None:
    """All rollouts of a group, three tokens each."""
    for index, reward in enumerate(rewards):
        buffer.complete(rollout(group_id, index, (version, 3), reward=reward))


async def settle() -> None:
    """Let every task that can run, run."""
    for _ in range(6):
        await asyncio.sleep(0)
