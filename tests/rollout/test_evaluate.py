"""Evaluation: means over what was scored, failures counted apart, the first cause raised."""

from __future__ import annotations

import asyncio
import math

import pytest

from asyncrl.clock import run_virtual
from asyncrl.errors import RunAborted
from asyncrl.rollout.engine import Interruption
from asyncrl.rollout.evaluate import first_failure, roll_out_all, summarise
from asyncrl.rollout.fake_engine import FakeEngine, Faults, fake_manifest
from asyncrl.types import Prompt, Rollout, Sequence, SequenceBuilder, Status
from tests.rollout.rollout_fakes import one_turn, router_of, worker_of


def sequence(version: int) -> Sequence:
    builder = SequenceBuilder([1])
    builder.sampled([2], logprobs=[-0.5], policy_version=version, kv_fresh=True, turn=0)
    return builder.build()


def rollout(reward: float | None, *, source: str = "sums", version: int = 4) -> Rollout:
    """A scored rollout, or a failed one."""
    status, rewards = (Status.STOP, {"total": reward}) if reward is not None else (Status.REWARD_ERROR, {})
    return Rollout("p", -1, 0, (sequence(version),), status, rewards, source=source)


def test_the_mean_is_over_scored_rollouts_and_failures_are_counted():
    evaluation = summarise([rollout(1.0), rollout(0.0), rollout(None, version=2), rollout(0.5, source="hard", version=5)])
    assert evaluation.reward_mean == 0.5
    assert evaluation.by_source == {"sums": 0.5, "hard": 0.5}
    assert (evaluation.num_rollouts, evaluation.num_errors) == (4, 1)
    assert (evaluation.version_min, evaluation.version_max) == (2, 5)


def test_an_evaluation_in_which_everything_failed_has_no_mean():
    evaluation = summarise([rollout(None)])
    assert math.isnan(evaluation.reward_mean)
    assert (evaluation.by_source, evaluation.num_errors) == ({}, 1)
    assert summarise([]).version_max == -1


def test_results_come_in_the_order_of_the_prompts_stamped_with_their_versions():
    async def main():
        router = await router_of(FakeEngine())
        worker = worker_of(router, max_new_tokens=4)
        prompts = [Prompt(tokens=(3,) * length, prompt_id=str(length)) for length in (3, 1, 2)]
        running = asyncio.create_task(roll_out_all(worker, prompts, group_id=-1, timeout_s=1e6))
        await asyncio.sleep(2.5)
        await router.update(fake_manifest(1, base=0), Interruption.KEEP)
        return await running
    rollouts = run_virtual(main())
    assert [(r.prompt_id, r.group_id, r.index) for r in rollouts] == [("3", -1, 0), ("1", -1, 1), ("2", -1, 2)]
    evaluation = summarise(rollouts)
    assert (evaluation.reward_mean, evaluation.version_min, evaluation.version_max) == (1.0, 0, 1)


def test_the_cause_is_raised_itself_and_not_a_group_around_it():
    async def second_aborts(prompt, session):
        if prompt.prompt_id == "1":
            raise RunAborted("no engine serves")
        return await one_turn(prompt, session)

    async def main():
        worker = worker_of(await router_of(FakeEngine()), second_aborts)
        with pytest.raises(RunAborted, match="no engine serves"):
            await roll_out_all(worker, [Prompt(tokens=(3,), prompt_id=str(n)) for n in range(3)], group_id=-1, timeout_s=1e6)
        assert worker.in_flight() == (0, 0)
    run_virtual(main())


def test_an_engine_that_hangs_ends_the_wait_and_the_prompts_are_named():
    async def main():
        engine = FakeEngine()
        worker = worker_of(await router_of(engine), max_new_tokens=4)
        engine.faults = Faults(hang_after_tokens=2)
        with pytest.raises(RunAborted, match=r"2 of 2 rollouts .* after 60 s.*'a', 'b'"):
            await roll_out_all(worker, [Prompt(tokens=(3,), prompt_id=name) for name in "ab"], group_id=-1, timeout_s=60)
        assert worker.in_flight() == (0, 0)
    run_virtual(main())


def test_the_first_failure_is_found_at_any_depth():
    cause = ValueError("here")
    assert first_failure(ExceptionGroup("a", [ExceptionGroup("b", [cause, KeyError("k")]), TypeError()])) is cause
    assert first_failure(cause) is cause
