"""Rollouts outside the buffer: in order, all or the first cause, and no wait without an end."""

from __future__ import annotations

import asyncio

import pytest

from asyncrl.clock import run_virtual
from asyncrl.errors import RunAborted
from asyncrl.rollout.engine import Interruption
from asyncrl.rollout.evaluate import first_failure, roll_out_all
from asyncrl.rollout.fake_engine import FakeEngine, Faults, fake_manifest
from asyncrl.types import Prompt
from tests.rollout.rollout_fakes import one_turn, router_of, worker_of


def test_results_come_in_the_order_of_the_prompts_stamped_with_their_versions():
    async def main():
        router = await router_of(FakeEngine())
        worker = worker_of(router, max_new_tokens=4)
        prompts = [Prompt(tokens=(3,) * length, prompt_id=str(length)) for length in (3, 1, 2)]
        running = asyncio.create_task(roll_out_all(worker, prompts, group_id=-1, stall_timeout_s=1e6))
        await asyncio.sleep(2.5)
        await router.update(fake_manifest(1, base=0), Interruption.KEEP)
        return await running
    rollouts = run_virtual(main())
    assert [(r.prompt_id, r.group_id, r.index) for r in rollouts] == [("3", -1, 0), ("1", -1, 1), ("2", -1, 2)]
    assert {span.policy_version for r in rollouts for sequence in r.sequences for span in sequence.spans} == {0, 1}


def test_the_cause_is_raised_itself_and_not_a_group_around_it():
    async def second_aborts(prompt, session):
        if prompt.prompt_id == "1":
            raise RunAborted("no engine serves")
        return await one_turn(prompt, session)

    async def main():
        worker = worker_of(await router_of(FakeEngine()), second_aborts)
        with pytest.raises(RunAborted, match="no engine serves"):
            await roll_out_all(worker, [Prompt(tokens=(3,), prompt_id=str(n)) for n in range(3)], group_id=-1, stall_timeout_s=1e6)
        assert worker.in_flight() == (0, 0)
    run_virtual(main())


def test_an_engine_that_hangs_ends_the_wait_and_the_prompts_are_named():
    async def main():
        engine = FakeEngine()
        worker = worker_of(await router_of(engine), max_new_tokens=4)
        engine.faults = Faults(hang_after_tokens=2)
        with pytest.raises(RunAborted, match=r"2 of 2 rollouts .* none has for 60 s.*'a', 'b'"):
            await roll_out_all(worker, [Prompt(tokens=(3,), prompt_id=name) for name in "ab"], group_id=-1, stall_timeout_s=60)
        assert worker.in_flight() == (0, 0)
    run_virtual(main())


def test_a_long_evaluation_is_no_stall_while_its_rollouts_end():
    async def one_a_minute(prompt, session):
        await asyncio.sleep(60.0 * int(prompt.prompt_id))
        return await one_turn(prompt, session)

    async def main():
        worker = worker_of(await router_of(FakeEngine()), one_a_minute)
        prompts = [Prompt(tokens=(3,), prompt_id=str(minute)) for minute in range(1, 11)]
        assert len(await roll_out_all(worker, prompts, group_id=-1, stall_timeout_s=90.0)) == 10
        with pytest.raises(RunAborted, match=r"1 of 2 .* \['9'\]"):
            await roll_out_all(worker, [prompts[0], prompts[8]], group_id=-1, stall_timeout_s=90.0)
    run_virtual(main())


def test_the_first_failure_is_found_at_any_depth():
    cause = ValueError("here")
    assert first_failure(ExceptionGroup("a", [ExceptionGroup("b", [cause, KeyError("k")]), TypeError()])) is cause
    assert first_failure(cause) is cause
