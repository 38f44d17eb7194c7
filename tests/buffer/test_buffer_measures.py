"""Limits and what is measured: bytes, depth, lag, staleness, length bias."""

import asyncio

import pytest

from asyncrl.buffer.replay_buffer import ReplayBuffer
from asyncrl.clock import run_virtual
from asyncrl.errors import ConfigError
from asyncrl.types import Prompt
from tests.buffer.buffer_fakes import admit_all, complete_group, make_buffer, rollout, settle


def ids(batch):
    return [group.group_id for group in batch.groups]



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


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_the_order_in_which_groups_end_changes_no_bit_of_a_mean(order):
    async def main():
        buffer = make_buffer(groups_per_step=3, max_staleness=1, window=1)
        await admit_all(buffer, most=3)
        for group_id in order:
            complete_group(buffer, group_id, version=0, rewards=((0.1, 0.1), (0.7, 0.7), (0.3, 0.3))[group_id])
        assert buffer.metrics().result()["reward/total/mean"] == (0.1 + 0.1 + 0.7 + 0.7 + 0.3 + 0.3) / 6

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



def test_settings_come_as_one_configuration_or_by_name():
    config = ReplayBuffer(groups_per_step=4, group_size=2, max_staleness=1).config
    assert ReplayBuffer(config).config is config
    with pytest.raises(TypeError, match="group_size"):
        ReplayBuffer(config, group_size=3)
    with pytest.raises(ConfigError, match=r"buffer\.group_sizes"):
        ReplayBuffer(groups_per_step=4, group_sizes=2, max_staleness=1)
