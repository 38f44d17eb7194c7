"""The policies `drop` and `token_mask`: what is too old is dropped, or loses its gradient."""

import pytest

from asyncrl.accounting import Ledger
from asyncrl.buffer.config import buffer_config, check_publish_interval, make_policy
from asyncrl.buffer.staleness import mask_older
from asyncrl.clock import run_virtual
from asyncrl.errors import ConfigError, StalenessError
from asyncrl.types import Prompt
from tests.buffer.buffer_fakes import admit_all, batch_of, make_buffer, rollout

DROP, MASK = ({"kind": kind, "cut_staleness": 1} for kind in ("drop", "token_mask"))


def policy_of(kind):
    return make_policy(buffer_config(groups_per_step=1, group_size=2, max_staleness=3, policy=kind))


def finish(buffer, group_id, *spans):
    for index in range(2):
        buffer.complete(rollout(group_id, index, *spans, reward=float(index)))


async def trained_steps(buffer, count):
    """So many steps on groups of one token, which the engine follows; nothing else becomes whole."""
    for _ in range(count):
        slots = await admit_all(buffer, most=2)
        for slot in slots:
            finish(buffer, slot.group_id, (slot.policy_version, 1))
        buffer.trained(await buffer.take())
        buffer.acknowledge("e0", buffer.version)


def test_a_group_older_than_the_cut_is_dropped_before_a_batch_is_chosen_and_its_prompt_comes_back():
    async def main():
        buffer = make_buffer(policy=DROP, max_staleness=3)
        slow = await buffer.admit(Prompt(text="slow", prompt_id=""))
        await trained_steps(buffer, 2)
        finish(buffer, slow.group_id, (0, 5), (2, 1))
        young = [await buffer.admit(Prompt()) for _ in range(2)]
        for slot in young:
            finish(buffer, slot.group_id, (2, 1))
        batch = await buffer.take()
        assert [group.group_id for group in batch.groups] == [slot.group_id for slot in young]
        assert [prompt.text for prompt in buffer.unfinished()].count("slow") == 1
        assert [prompt.text for prompt in buffer.refills()] == ["slow"]
        assert buffer.refills() == ()
        metrics = buffer.metrics().result()
        assert (metrics["buffer/dropped_too_stale/groups"], metrics["buffer/dropped_too_stale/tokens"]) == (1, 12)
        return metrics["buffer/length_bias/last"]

    # trained: 8 rollouts of 1 token; decided: these and 2 of 6
    assert run_virtual(main()) == pytest.approx(1.0 / ((8 + 12) / 10))


def test_a_group_at_the_cut_is_trained_on():
    async def main():
        buffer = make_buffer(policy=DROP, max_staleness=3)
        slow = await buffer.admit(Prompt())
        await trained_steps(buffer, 1)
        finish(buffer, slow.group_id, (0, 5))
        young = await buffer.admit(Prompt())
        finish(buffer, young.group_id, (1, 1))
        return [group.group_id for group in (await buffer.take()).groups] == [slow.group_id, young.group_id]

    assert run_virtual(main())


def test_nothing_comes_back_once_the_data_have_ended():
    async def main():
        buffer = make_buffer(policy=DROP, max_staleness=3)
        slow = await buffer.admit(Prompt())
        await trained_steps(buffer, 2)
        buffer.end_of_data()
        finish(buffer, slow.group_id, (0, 5))
        assert await buffer.take() is None
        return buffer.refills(), buffer.unfinished()

    assert run_virtual(main()) == ((), ())


def test_tokens_older_than_the_cut_lose_their_gradient_and_the_ledger_closes():
    async def main():
        ledger = Ledger()
        buffer = make_buffer(policy=MASK, max_staleness=3, ledger=ledger)
        slow = await buffer.admit(Prompt())
        for group_id in range(5):
            for index in range(2):
                ledger.generated((group_id, index, 0), 6 if group_id == slow.group_id else 1)
        await trained_steps(buffer, 2)
        finish(buffer, slow.group_id, (0, 3), (1, 2), (2, 1))
        young = await buffer.admit(Prompt())
        for index in range(2):
            ledger.generated((young.group_id, index, 0), 0 if young.group_id < 5 else 1)
        finish(buffer, young.group_id, (2, 1))
        batch = await buffer.take()
        masks = [rollout.sequences[0].loss_mask.tolist() for rollout in batch.rollouts]
        assert masks == [[False] * 5 + [True] * 3] * 2 + [[False] * 2 + [True]] * 2
        return buffer.metrics().result()

    metrics = run_virtual(main())
    assert metrics["buffer/masked_too_stale/tokens"] == 6
    # kept: 3 of 6 tokens of two rollouts, 1 of 1 of two; before: 6 of 6, and the same
    assert metrics["buffer/mask_length_bias/last"] == pytest.approx(((3 * 6 + 1) / 4) / ((6 * 6 + 1) / 7))
    assert "buffer/dropped_too_stale/groups" not in metrics


def test_a_batch_with_nothing_too_old_is_not_touched():
    batch = batch_of(4, 3, 4)
    assert mask_older(batch, least_version=3) is batch


@pytest.mark.parametrize("policy", [DROP, MASK])
def test_the_promise_is_checked_on_the_batch(policy):
    checked = policy_of(policy)
    checked.check(batch_of(4, 3, 4), 4)
    with pytest.raises(StalenessError, match=r"staleness 2, not in \[0, 1\]"):
        checked.check(batch_of(4, 2), 4)
    with pytest.raises(StalenessError, match="staleness -1"):
        checked.check(batch_of(4, 5), 4)


def test_a_masked_token_may_be_older_than_the_cut_and_never_from_the_future():
    checked = policy_of(MASK)
    checked.check(mask_older(batch_of(4, 1, 4), least_version=checked.oldest_trained(4)), 4)


@pytest.mark.parametrize("kind", ["drop", "token_mask"])
def test_a_cut_below_what_engines_write_before_a_publish_is_refused(kind):
    config = buffer_config(groups_per_step=2, group_size=2, max_staleness=4, policy={"kind": kind, "cut_staleness": 1})
    check_publish_interval(config, 2)
    with pytest.raises(ConfigError, match="cut_staleness >= publish_every_steps - 1"):
        check_publish_interval(config, 3)
