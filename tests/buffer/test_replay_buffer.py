import asyncio

import numpy as np
import pytest

from asyncrl.accounting import Count, Ledger
from asyncrl.buffer.recorder import MemoryRecorder
from asyncrl.buffer.replay_buffer import ReplayBuffer
from asyncrl.clock import now_s, run_virtual
from asyncrl.errors import BufferStarved, ConfigError, LedgerError, NonFiniteError, RunAborted, ShapeError, StalenessError
from asyncrl.types import Prompt, Status
from tests.buffer.buffer_fakes import admit_all, complete_group, make_buffer, rollout, settle


def ids(batch):
    return [group.group_id for group in batch.groups]


def test_a_group_travels_from_admission_to_a_free_slot():
    async def main():
        recorder = MemoryRecorder()
        buffer = make_buffer(recorder=recorder, window=1)
        slots = await admit_all(buffer)
        assert [(slot.group_id, slot.policy_version) for slot in slots] == [(0, 0), (1, 0), (2, 0), (3, 0)]
        for group_id in (1, 0):
            complete_group(buffer, group_id, version=0)
        batch = await buffer.take()
        assert (batch.version, ids(batch)) == (0, [0, 1])
        assert await admit_all(buffer) == []
        buffer.trained(batch)
        assert buffer.version == 1
        assert await admit_all(buffer) == [], "the engine does not have the batch yet"
        buffer.acknowledge("e0", 1)
        assert [(slot.group_id, slot.policy_version) for slot in await admit_all(buffer)] == [(4, 1), (5, 1)]
        assert [(e.kind, e.subject) for e in recorder.events[:6]] == [*(("admitted", n) for n in range(4)), ("scored", 1), ("scored", 0)]

    run_virtual(main())


def test_with_zero_staleness_every_token_has_the_version_of_its_step():
    async def main():
        buffer = make_buffer(max_staleness=0, depth_groups="auto")
        for version in range(20):
            slots = await admit_all(buffer)
            assert len(slots) == 2
            for slot in slots:
                complete_group(buffer, slot.group_id, version=version)
            batch = await buffer.take()
            assert batch.version == version
            buffer.trained(batch)
            buffer.acknowledge("e0", version + 1)
        assert buffer.staleness_tokens == {0: 20 * 2 * 2 * 3}

    run_virtual(main())


def test_ready_groups_are_never_lost_between_batches():
    async def main():
        buffer = make_buffer(groups_per_step=4, max_staleness=2, window=3)
        taken = []
        await admit_all(buffer)
        for group_id in range(10):
            complete_group(buffer, group_id, version=0)
        for version in range(2):
            batch = await buffer.take()
            taken += ids(batch)
            buffer.trained(batch)
            assert len(ids(batch)) == 4
            assert buffer.version == version + 1
        assert taken == list(range(8))
        assert buffer.held() == Count(tokens=2 * 2 * 3, rollouts=4)
        buffer.end_of_data()
        assert await buffer.take() is None
        assert buffer.held() == Count(12, 4)

    run_virtual(main())


def test_slots_wait_for_the_slowest_serving_engine():
    async def main():
        buffer = make_buffer(window=1)
        buffer.add_engine("e1", 0)
        for slot in await admit_all(buffer):
            complete_group(buffer, slot.group_id, version=0)
        buffer.trained(await buffer.take())
        buffer.acknowledge("e0", 1)
        assert await admit_all(buffer) == []
        buffer.fence("e1")
        assert len(await admit_all(buffer)) == 2

    run_virtual(main())


def test_an_engine_serves_nothing_before_it_holds_the_newest_version():
    async def main():
        buffer = make_buffer(version=7)
        buffer.add_engine("late", 3)
        states = []
        for version in (5, 7):
            states.append([e.serving for e in buffer.view().engines])
            buffer.acknowledge("late", version)
        states.append([e.serving for e in buffer.view().engines])
        assert states == [[True, False], [True, False], [True, True]]
        assert buffer.view().served_version == 7

    run_virtual(main())


def test_while_no_engine_serves_no_slot_is_released():
    async def main():
        buffer = make_buffer(window=1)
        for slot in await admit_all(buffer):
            complete_group(buffer, slot.group_id, version=0)
        buffer.trained(await buffer.take())
        buffer.fence("e0")
        assert await admit_all(buffer) == []
        buffer.add_engine("e0", 0)
        assert await admit_all(buffer) == []
        buffer.acknowledge("e0", 1)
        assert [slot.policy_version for slot in await admit_all(buffer)] == [1, 1]

    run_virtual(main())


def test_versions_only_increase():
    async def main():
        buffer = make_buffer(version=41)
        with pytest.raises(StalenessError, match="acknowledged version 0 after 41"):
            buffer.acknowledge("e0", 0)
        with pytest.raises(StalenessError, match="acknowledged version 42; the trainer is at 41"):
            buffer.acknowledge("e0", 42)
        with pytest.raises(StalenessError, match="never added"):
            buffer.acknowledge("e9", 41)
        with pytest.raises(StalenessError, match="never added"):
            buffer.fence("e9")
        with pytest.raises(StalenessError, match="already serves"):
            buffer.add_engine("e0", 41)

    run_virtual(main())


def test_only_the_batch_that_was_taken_counts_as_trained():
    async def main():
        buffer = make_buffer()
        for slot in await admit_all(buffer):
            complete_group(buffer, slot.group_id, version=0)
        batch = await buffer.take()
        with pytest.raises(RuntimeError, match="batch of version 0 is out"):
            await buffer.take()
        buffer.trained(batch)
        with pytest.raises(StalenessError, match="none is taken"):
            buffer.trained(batch)
        assert buffer.version == 1

    run_virtual(main())


@pytest.mark.parametrize(("bad", "error", "message"), [
    (rollout(0, 0, (0, 3)), LedgerError, "completed twice"),
    (rollout(0, 2, (0, 3)), ShapeError, r"index must be in \[0, 2\)"),
    (rollout(0, 1, (0, 3), prompt_id="other"), ShapeError, "answers prompt 'other'"),
    (rollout(0, 1, (0, 3), reward=float("nan")), NonFiniteError, "has reward nan"),
    (rollout(9, 0, (0, 3)), LedgerError, "was never admitted"),
])
def test_a_rollout_that_does_not_belong_is_refused_and_changes_nothing(bad, error, message):
    async def main():
        buffer = make_buffer()
        await buffer.admit(Prompt())
        buffer.complete(rollout(0, 0, (0, 3)))
        with pytest.raises(error, match=message):
            buffer.complete(bad)
        assert buffer.held() == Count(3, 1)

    run_virtual(main())


def test_a_rollout_of_a_group_that_is_complete_is_refused():
    async def main():
        buffer = make_buffer()
        await buffer.admit(Prompt())
        complete_group(buffer, 0, version=0)
        with pytest.raises(LedgerError, match="is complete, taken or gone"):
            buffer.complete(rollout(0, 1, (0, 3)))

    run_virtual(main())


def test_groups_are_put_together_by_id_and_index_whatever_the_order():
    async def main():
        buffer = make_buffer(group_size=3)
        await admit_all(buffer)
        for group_id, index in [(1, 2), (0, 1), (1, 0), (0, 2), (0, 0), (1, 1)]:
            buffer.complete(rollout(group_id, index, (0, 1 + index), reward=float(index)))
        batch = await buffer.take()
        assert [(r.group_id, r.index, r.reward) for r in batch.rollouts] == [(g, n, float(n)) for g in (0, 1) for n in (0, 1, 2)]

    run_virtual(main())


@pytest.mark.parametrize(("rewards", "dropped"), [((0.7,) * 16, True), ((0.7,) * 15 + (0.7 + 1e-5,), False), ((0.0,) * 15 + (1.0,), False)])
def test_equal_rewards_are_found_by_their_range(rewards, dropped):
    async def main():
        buffer = make_buffer(group_size=16)
        await buffer.admit(Prompt())
        complete_group(buffer, 0, version=0, rewards=tuple(np.float32(r) for r in rewards))
        assert (buffer.held() == Count(0, 0)) == dropped
        assert buffer.metrics().result()["buffer/zero_variance/frac"] == float(dropped)

    run_virtual(main())


def test_equal_rewards_stay_when_told_so_and_single_rollouts_always():
    async def main():
        for settings in ({"zero_variance": "keep"}, {"group_size": 1}):
            buffer = make_buffer(**settings)
            await buffer.admit(Prompt())
            complete_group(buffer, 0, version=0, rewards=(1.0,) * buffer.config.group_size)
            assert buffer.held().rollouts == buffer.config.group_size

    run_virtual(main())


def test_the_mean_reward_is_that_before_the_filter():
    async def main():
        buffer = make_buffer(groups_per_step=1)
        first, second = await admit_all(buffer)
        complete_group(buffer, first.group_id, version=0, rewards=(1.0, 1.0))
        assert buffer.metrics().result()["reward/total/mean"] == 1.0
        complete_group(buffer, second.group_id, version=0, rewards=(0.0, 1.0))
        assert "reward/total/mean" not in buffer.metrics().result()
        (third,) = await admit_all(buffer)
        complete_group(buffer, third.group_id, version=0, rewards=(1.0, 1.0))
        assert len((await buffer.take()).groups) == 1
        result = buffer.metrics().result()
        assert (result["reward/total/mean"], result["reward/rollouts/sum"]) == (0.75, 4.0)
        assert result["reward/source.train/mean"] == 0.75
    run_virtual(main())


def test_a_zero_variance_group_is_replaced_at_once():
    async def main():
        buffer = make_buffer(window=1)
        await admit_all(buffer)
        complete_group(buffer, 0, version=0, rewards=(1.0, 1.0))
        assert [slot.group_id for slot in await admit_all(buffer)] == [4]
        for group_id in (1, 2):
            complete_group(buffer, group_id, version=0)
        assert ids(await buffer.take()) == [1, 2], "the dropped group does not block the head"

    run_virtual(main())


def test_a_rollout_with_an_error_stays_without_gradient():
    async def main():
        buffer = make_buffer(groups_per_step=1, group_size=3)
        await buffer.admit(Prompt())
        for index, status in enumerate((Status.STOP, Status.REWARD_TIMEOUT, Status.LENGTH)):
            buffer.complete(rollout(0, index, (0, 2), reward=float(index), status=status))
        batch = await buffer.take()
        assert [int(r.sequences[0].loss_mask.sum()) for r in batch.rollouts] == [2, 0, 2]
        assert buffer.metrics().result()["rollout/status_reward_timeout/sum"] == 1

    run_virtual(main())


@pytest.mark.parametrize("bad", [Status.ENGINE_ERROR, Status.INTERRUPTED, Status.REWARD_ERROR])
def test_a_group_with_too_few_valid_rollouts_is_dropped(bad):
    async def main():
        buffer = make_buffer()
        await buffer.admit(Prompt())
        buffer.complete(rollout(0, 0, (0, 2), reward=1.0))
        buffer.complete(rollout(0, 1, status=bad))
        result = buffer.metrics().result()
        assert (result["buffer/dropped_too_few_valid/groups"], result["buffer/dropped_too_few_valid/tokens"]) == (1, 2)
        assert buffer.view().slots == ()

    run_virtual(main())


def test_late_rollouts_of_a_dropped_group_are_accounted_under_its_reason():
    async def main():
        ledger = Ledger()
        buffer = make_buffer(ledger=ledger, group_size=3)
        await buffer.admit(Prompt())
        for index in range(3):
            ledger.generated((0, index, 0), 2)
        buffer.complete(rollout(0, 0, (0, 2)))
        assert buffer.drop(0, "cancelled")
        assert not buffer.drop(0, "again")
        ledger.check(buffered=buffer.held(), in_flight=(4, 2))
        buffer.complete(rollout(0, 1, (0, 2)))
        with pytest.raises(LedgerError):
            buffer.complete(rollout(0, 1, (0, 2)))
        ledger.abandoned((0, 2, 0), "cancelled")
        account = ledger.check(buffered=buffer.held(), in_flight=(0, 0))
        assert account.dropped == {"cancelled": Count(6, 3)}
        with pytest.raises(LedgerError, match="group 5 was never admitted"):
            buffer.drop(5, "unknown")

    run_virtual(main())


def test_a_taken_group_cannot_be_dropped_but_everything_can_at_the_end():
    async def main():
        ledger = Ledger()
        buffer = make_buffer(ledger=ledger)
        for slot in await admit_all(buffer):
            for index in range(2):
                ledger.generated((slot.group_id, index, 0), 3)
        for group_id in range(3):
            complete_group(buffer, group_id, version=0)
        await buffer.take()
        assert not buffer.drop(0, "too late")
        ledger.abandoned((3, 0, 0), "end_of_run")
        ledger.abandoned((3, 1, 0), "end_of_run")
        buffer.drop_all("end_of_run")
        assert ledger.check(buffered=buffer.held(), in_flight=(0, 0)).dropped == {"end_of_run": Count(24, 8)}

    run_virtual(main())


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


def test_bytes_hold_admission_back_but_never_below_what_a_step_needs():
    async def main():
        # A rollout of 3 tokens behind 2 prompt tokens stores 5 * (4 + 1 + 4 + 2) = 55 bytes, a group of two 110.
        buffer = make_buffer(max_staleness=3, window=1, max_bytes=1)
        for slot in await admit_all(buffer, most=2):
            complete_group(buffer, slot.group_id, version=0)
        assert buffer.metrics().result()["buffer/bytes/last"] == 220
        assert await admit_all(buffer) == []
        batch = await buffer.take()
        assert await admit_all(buffer) == []
        buffer.trained(batch)
        assert len(await admit_all(buffer)) == 6, "arrays of a trained batch are gone, its slots are not"

    run_virtual(main())


def test_depth_grows_while_the_trainer_waits_for_want_of_it_and_shrinks_when_groups_are_left_over():
    async def main():
        buffer = make_buffer(groups_per_step=8, group_size=1, max_staleness=4, window=1, depth_groups="auto")
        depths = [buffer.view().depth_groups]
        assert len(await admit_all(buffer)) == 16
        feeding = asyncio.ensure_future(buffer.admit(Prompt()))
        taking = asyncio.ensure_future(buffer.take())
        await settle()
        assert feeding.done(), "the deeper buffer admits at once"
        depths.append(buffer.view().depth_groups)
        for group_id in range(17):
            complete_group(buffer, group_id, version=0, rewards=(1.0,))
        buffer.trained(await taking)
        for version in range(1, 5):
            buffer.acknowledge("e0", version)
            for slot in await admit_all(buffer):
                complete_group(buffer, slot.group_id, version=version, rewards=(1.0,))
            buffer.trained(await buffer.take())
        depths.append(buffer.view().depth_groups)
        # Each of the four takes found 17 ready and left 9, of which 5 are given up.
        assert depths == [16, 17, 12]

    run_virtual(main())


def test_depth_stays_while_the_trainer_waits_for_slow_groups_alone():
    async def main():
        buffer = make_buffer(groups_per_step=8, group_size=1, max_staleness=4, window=1, depth_groups="auto")
        await buffer.admit(Prompt())
        taking = asyncio.ensure_future(buffer.take())
        await settle()
        assert buffer.view().depth_groups == 16
        taking.cancel()

    run_virtual(main())


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_fixed_lag_trains_every_batch_exactly_so_many_steps_late(lag):
    async def main():
        buffer = make_buffer(max_staleness=2, depth_groups="auto", policy={"kind": "fixed_lag", "lag_steps": lag})
        admitted_at = {}
        for version in range(8):
            first = True
            while slots := await admit_all(buffer):
                for slot in slots:
                    admitted_at[slot.group_id] = version
                    # The first group of each round has equal rewards and is replaced at the same version.
                    complete_group(buffer, slot.group_id, version=version, rewards=(1.0, 1.0) if first else (0.0, 1.0))
                    first = False
            batch = await buffer.take()
            assert {admitted_at[group_id] for group_id in ids(batch)} == {max(0, version - lag)}
            assert set(batch.version - v for r in batch.rollouts for v in r.sequences[0].policy_versions[2:]) == {min(lag, version)}
            buffer.trained(batch)
            assert await admit_all(buffer) == [], "nothing runs while the weights change"
            buffer.acknowledge("e0", version + 1)

    run_virtual(main())


def test_staleness_and_length_bias_are_measured():
    async def main():
        buffer = make_buffer(groups_per_step=1, max_staleness=2, window=1)
        await admit_all(buffer, most=3)
        for group_id, lengths in enumerate(((2, 4), (4, 4), (3, 3))):
            rewards = (1.0, 1.0) if group_id == 1 else (0.0, 1.0)
            for index, (tokens, reward) in enumerate(zip(lengths, rewards, strict=True)):
                buffer.complete(rollout(group_id, index, (0, tokens), reward=reward))
        buffer.trained(await buffer.take())
        buffer.trained(await buffer.take())
        result = buffer.metrics().result()
        # 6 tokens of the first batch are fresh, 6 of the second one step old.
        assert (result["staleness/token/mean"], result["staleness/token/max"]) == (0.5, 1)
        assert (result["staleness/rollout/mean"], result["staleness/rollout/max"]) == (0.5, 1)
        assert (result["staleness/tokens_at_0/last"], result["staleness/tokens_at_1/last"]) == (6, 6)
        assert result["staleness/over_bound_tokens/sum"] == 0
        # Trained: 12 tokens in 4 rollouts; trained or dropped: 20 in 6.
        assert result["buffer/length_bias/last"] == pytest.approx((12 / 4) / (20 / 6))
        assert (result["buffer/dropped_zero_variance/groups"], result["buffer/dropped_zero_variance/tokens"]) == (1, 8)
        assert (result["buffer/held/last"], result["buffer/ready/last"], result["buffer/depth/last"]) == (2, 0, 3)
        assert "staleness/token/mean" not in buffer.metrics().result()

    run_virtual(main())


@pytest.mark.parametrize(("discards", "share", "bias"), [(False, 0.25, 1.0), (True, 0.0, 2.0 / 4.0)])
def test_slow_prompts_keep_their_share_unless_they_are_discarded_and_then_it_shows(discards, share, bias):
    async def main():
        # Every fourth prompt takes 5 rounds and 10 tokens, the others 1 round and 2 tokens: 4 tokens in the mean.
        buffer = make_buffer(groups_per_step=4, group_size=1, max_staleness=2)
        rounds_left, slow_trained = {}, []
        while len(slow_trained) < 200:
            rounds_left |= {slot.group_id: 1 if slot.group_id % 4 else 5 for slot in await admit_all(buffer)}
            for group_id in list(rounds_left):
                rounds_left[group_id] -= 1
                if discards and rounds_left[group_id] == 2:
                    buffer.drop(group_id, "too_slow")
                if rounds_left[group_id] == 0:
                    del rounds_left[group_id]
                    buffer.complete(rollout(group_id, 0, (buffer.version, 2 if group_id % 4 else 10)))
            taking = asyncio.ensure_future(buffer.take())
            await settle()
            if taking.done():
                buffer.trained(taking.result())
                buffer.acknowledge("e0", buffer.version)
                slow_trained.append(sum(group_id % 4 == 0 for group_id in ids(taking.result())))
            taking.cancel()
        return sum(slow_trained) / (4 * 200), buffer.metrics().result()["buffer/length_bias/last"]

    assert run_virtual(main()) == (pytest.approx(share, abs=0.02), pytest.approx(bias, abs=0.02))


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


def test_settings_come_as_one_configuration_or_by_name():
    config = ReplayBuffer(groups_per_step=4, group_size=2, max_staleness=1).config
    assert ReplayBuffer(config).config is config
    with pytest.raises(TypeError, match="group_size"):
        ReplayBuffer(config, group_size=3)
    with pytest.raises(ConfigError, match=r"buffer\.group_sizes"):
        ReplayBuffer(groups_per_step=4, group_sizes=2, max_staleness=1)
