"""Groups through the buffer: admitted, filled, judged, taken, released, dropped."""


import numpy as np
import pytest

from asyncrl.accounting import Count, Ledger
from asyncrl.buffer.recorder import MemoryRecorder
from asyncrl.clock import run_virtual
from asyncrl.errors import LedgerError, NonFiniteError, ShapeError, StalenessError
from asyncrl.types import Prompt, Status
from tests.buffer.buffer_fakes import admit_all, complete_group, make_buffer, rollout


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


def test_a_prompt_is_unfinished_until_it_is_trained_on_or_dropped():
    async def main():
        buffer = make_buffer()
        prompts = [Prompt(text=str(number)) for number in range(4)]
        for prompt in prompts:
            await buffer.admit(prompt)
        for group_id in range(3):
            complete_group(buffer, group_id, version=0)
        buffer.drop(1, "tired")
        batch = await buffer.take()
        assert buffer.unfinished() == (prompts[0], prompts[2], prompts[3]), "nothing is trained on yet"
        buffer.trained(batch)
        assert buffer.unfinished() == (prompts[3],)

    run_virtual(main())
