"""Every wait ends: with what it waited for, a named shortage, or the failure of whoever it waited for."""

import asyncio

import pytest

from asyncrl.accounting import Ledger
from asyncrl.buffer.replay_buffer import ReplayBuffer
from asyncrl.clock import now_s, run_virtual
from asyncrl.errors import BufferStarved, ConfigError, RunAborted
from asyncrl.types import Prompt
from tests.buffer.buffer_fakes import admit_all, complete_group, make_buffer, rollout, settle


def ids(batch):
    return [group.group_id for group in batch.groups]



def test_a_starved_trainer_is_told_which_groups_are_missing():
    async def main():
        buffer = make_buffer(group_size=8, stall_timeout_s=30.0)
        buffer.add_engine("e1", 0)
        buffer.fence("e1")
        await admit_all(buffer)
        await asyncio.sleep(5.0)
        for index in range(7):
            buffer.complete(rollout(0, index, (0, 1)))
        with pytest.raises(BufferStarved) as starved:
            await buffer.take()
        assert now_s() == pytest.approx(35.0)
        text = str(starved.value)
        assert "the trainer waits for a batch, and nothing has happened for 30 s." in text
        assert "group 0 (prompt ''): generating for 35 s, 7 of 8 rollouts complete, missing 7" in text
        assert "group 1 (prompt ''): generating for 35 s, 0 of 8 rollouts complete, missing 0, 1, 2, 3, 4, 5, 6, 7" in text
        assert "slots held: 4 (4 generating, 0 ready, 0 taken)" in text
        assert "engines: e0 at 0, e1 at 0 (fenced)" in text

    run_virtual(main())


def test_a_starved_admission_says_that_no_engine_was_added():
    async def main():
        buffer = ReplayBuffer(groups_per_step=1, group_size=1, max_staleness=0, stall_timeout_s=10.0)
        await buffer.admit(Prompt())
        with pytest.raises(BufferStarved, match=r"admission waits for a free slot(?s:.*)engines: none was added"):
            await buffer.admit(Prompt())

    run_virtual(main())


def test_completed_rollouts_put_the_time_out_off():
    async def main():
        buffer = make_buffer(groups_per_step=1, group_size=5, stall_timeout_s=10.0)
        await buffer.admit(Prompt())
        taking = asyncio.ensure_future(buffer.take())
        for index in range(5):
            await asyncio.sleep(9.0)
            buffer.complete(rollout(0, index, (0, 1), reward=float(index)))
        assert ids(await taking) == [0]
        assert buffer.metrics().result()["buffer/trainer_wait_s/sum"] == pytest.approx(45.0)

    run_virtual(main())


def test_a_failure_reaches_every_wait_now_and_later_with_its_own_exception():
    async def main():
        buffer = make_buffer()
        await admit_all(buffer)
        waits = [asyncio.ensure_future(wait) for wait in (buffer.take(), buffer.admit(Prompt()), buffer.admit(Prompt()))]
        await settle()
        cause = ValueError("the reward raised")
        buffer.fail(cause)
        buffer.fail(ValueError("a later one"))
        assert await asyncio.gather(*waits, return_exceptions=True) == [cause] * 3
        for wait in (buffer.take(), buffer.admit(Prompt())):
            with pytest.raises(ValueError, match="the reward raised"):
                await wait
        assert now_s() == 0.0

    run_virtual(main())


def test_cancelled_waits_leave_nothing_behind():
    async def main():
        buffer = make_buffer()
        for slot in await admit_all(buffer):
            complete_group(buffer, slot.group_id, version=0)
        admitting = asyncio.ensure_future(buffer.admit(Prompt()))
        await settle()
        buffer.trained(await buffer.take())
        buffer.acknowledge("e0", 1)
        admitting.cancel()
        await asyncio.gather(admitting, return_exceptions=True)
        assert len(await admit_all(buffer)) == 2

        batch = await buffer.take()
        buffer.trained(batch)
        taking = asyncio.ensure_future(buffer.take())
        await settle()
        for group_id in (4, 5):
            complete_group(buffer, group_id, version=1)
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        assert ids(await buffer.take()) == [4, 5]

    run_virtual(main())


def test_admissions_are_granted_in_the_order_of_the_calls():
    async def main():
        buffer = make_buffer(groups_per_step=1, max_staleness=0)
        first = await buffer.admit(Prompt(prompt_id="0"))
        order = []

        async def admit(name: str) -> None:
            order.append((await buffer.admit(Prompt(prompt_id=name))).prompt.prompt_id)

        waits = [asyncio.ensure_future(admit(name)) for name in "abc"]
        group_id = first.group_id
        for _ in range(3):
            await settle()
            buffer.drop(group_id, "test")
            group_id += 1
        await asyncio.gather(*waits)
        assert order == ["a", "b", "c"]

    run_virtual(main())


def test_batches_that_never_fill_end_the_run_with_a_diagnosis():
    async def main():
        buffer = make_buffer(max_empty_fills=3)
        for number in range(6):
            await buffer.admit(Prompt())
            complete_group(buffer, number, version=0, rewards=(float(number % 3 == 0),) * 2)
        with pytest.raises(RunAborted, match=r"6 groups in a row \(3 batches\) .*reward 0: 4 groups, reward 1: 2 groups"):
            await buffer.take()

    run_virtual(main())


def test_one_kept_group_starts_the_count_of_empty_fills_again():
    async def main():
        buffer = make_buffer(max_empty_fills=2, max_staleness=4)
        for number in range(7):
            await buffer.admit(Prompt())
            complete_group(buffer, number, version=0, rewards=(0.0, 1.0) if number in (3, 6) else (0.0, 0.0))
        assert ids(await buffer.take()) == [3, 6]

    run_virtual(main())


def test_attach_comes_before_the_first_admission():
    async def main():
        buffer = ReplayBuffer(groups_per_step=4, group_size=1, max_staleness=1)
        with pytest.raises(ConfigError, match="publish_every_steps"):
            buffer.attach(publish_every_steps=3)
        buffer.attach(publish_every_steps=2, version=6, ledger=Ledger())
        assert (buffer.version, buffer.policy.capacity_groups, buffer.view().depth_groups) == (6, 8, 8)
        buffer.add_engine("e0", 6)
        await buffer.admit(Prompt())
        with pytest.raises(RuntimeError, match="before the first admission"):
            buffer.attach()

    run_virtual(main())


def test_no_admission_after_the_end_of_the_data():
    async def main():
        buffer = make_buffer()
        buffer.end_of_data()
        with pytest.raises(RuntimeError, match="end_of_data"):
            await buffer.admit(Prompt())

    run_virtual(main())
