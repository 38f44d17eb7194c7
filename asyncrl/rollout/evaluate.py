"""Evaluation on the run's engines, outside buffer and ledger, stamped with the versions that answered."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from asyncrl.errors import RunAborted
from asyncrl.rollout.worker import RolloutWorker
from asyncrl.types import Prompt, Rollout


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Mean reward over a fixed set of prompts; rollouts that failed are counted, not scored."""

    reward_mean: float
    by_source: dict[str, float]
    num_rollouts: int
    num_errors: int
    version_min: int
    version_max: int


async def roll_out_all(worker: RolloutWorker, prompts: SequenceOf[Prompt], *, group_id: int, timeout_s: float) -> list[Rollout]:
    """One rollout a prompt, all at once. `group_id` is negative, so that no group of the buffer is meant.

    Raises RunAborted, naming the prompts, when some have not ended after `timeout_s`.
    """
    started: list[asyncio.Task[Rollout]] = []
    try:
        async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as tasks:
            started += [tasks.create_task(worker.run(prompt, group_id=group_id, index=index)) for index, prompt in enumerate(prompts)]
    except TimeoutError:
        open_ids = [prompt.prompt_id for prompt, task in zip(prompts, started, strict=True) if task.cancelled()]
        raise RunAborted(f"{len(open_ids)} of {len(prompts)} rollouts outside the buffer had not ended after {timeout_s:g} s, "
                         f"among them {open_ids[:8]}") from None
    except BaseExceptionGroup as failures:
        raise first_failure(failures) from None
    return [task.result() for task in started]


def first_failure(error: BaseException) -> BaseException:
    """The first error inside nested groups: one cause, not a page of siblings that were cancelled with it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def summarise(rollouts: SequenceOf[Rollout]) -> Evaluation:
    """The evaluation of finished rollouts. `reward_mean` is NaN when every one failed."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        if not rollout.status.is_error:
            rewards[rollout.source].append(rollout.reward)
    scored = [reward for values in rewards.values() for reward in values]
    versions = [span.policy_version for rollout in rollouts for sequence in rollout.sequences for span in sequence.spans]
    return Evaluation(reward_mean=float(np.mean(scored)) if scored else float("nan"),
                      by_source={source: float(np.mean(values)) for source, values in rewards.items()},
                      num_rollouts=len(rollouts), num_errors=len(rollouts) - len(scored),
                      version_min=min(versions, default=-1), version_max=max(versions, default=-1))
