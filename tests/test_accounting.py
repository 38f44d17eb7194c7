import pytest

from asyncrl.accounting import Account, Count, Ledger, rollout_key
from asyncrl.errors import LedgerError
from asyncrl.types import Batch, Prompt, RolloutGroup, Status
from tests.buffer.buffer_fakes import rollout


def written(ledger, group_id, index, *, chunks, **fields):
    """A finished rollout whose chunks the ledger has seen."""
    for tokens in chunks:
        ledger.generated((group_id, index, fields.get("attempt", 0)), tokens)
    return rollout(group_id, index, (0, sum(chunks)), **fields)


def batch_with(*rollouts):
    return Batch(0, (RolloutGroup(0, Prompt(), rollouts),))


def full_ledger():
    """Five rollouts: 7 tokens trained, 2 of an error masked, 4 dropped, 3 buffered, 5 in flight."""
    ledger = Ledger()
    good, bad = written(ledger, 0, 0, chunks=(3, 4)), written(ledger, 0, 1, chunks=(2,), status=Status.ENV_ERROR)
    dropped, kept = written(ledger, 1, 0, chunks=(1, 1, 2)), written(ledger, 2, 0, chunks=(3,))
    for done in (good, bad, dropped, kept):
        ledger.completed(done)
    ledger.dropped("zero_variance", tokens=4, rollouts=1)
    ledger.trained(batch_with(good, bad), trained_tokens=7, masked_tokens=2)
    ledger.generated((3, 0, 0), 5)
    return ledger


def test_every_token_and_every_rollout_is_somewhere():
    account = full_ledger().check(buffered=(3, 1), in_flight=(5, 1))
    assert account == Account(generated=Count(21, 5), trained=Count(7, 1), masked=Count(2, 1), dropped={"zero_variance": Count(4, 1)},
                              buffered=Count(3, 1), in_flight=Count(5, 1))
    assert account.placed == Count(21, 5)


@pytest.mark.parametrize(("buffered", "in_flight"), [
    ((0, 0), (5, 1)),      # the buffer lost a rollout
    ((6, 2), (5, 1)),      # it holds one twice
    ((3, 0), (5, 1)),      # rollouts alone are wrong
    ((2, 1), (5, 1)),      # one token is gone
    ((3, 1), (0, 0)),      # a worker lost a rollout
    ((3, 1), (10, 2)),     # two workers write the same one
    ((8, 2), (0, 0)),      # equal sums, but what is in flight by its chunks is not there
])
def test_a_rollout_lost_or_counted_twice_does_not_close(buffered, in_flight):
    with pytest.raises(LedgerError, match="the ledger does not close"):
        full_ledger().check(buffered=buffered, in_flight=in_flight)


def test_the_message_shows_both_sides_and_what_is_open():
    with pytest.raises(LedgerError) as error:
        full_ledger().check(buffered=(0, 0), in_flight=(5, 1))
    text = str(error.value)
    assert "tokens: generated 21, placed 18 (trained 7, masked 2, buffered 0, in_flight 5, dropped for zero_variance 4)" in text
    assert "difference +3" in text
    assert "rollouts: generated 5, placed 4" in text
    assert "1 rollouts with 5 tokens are in flight ((3, 0, 0): 5)" in text


def test_a_rollout_dropped_twice_does_not_close():
    ledger = full_ledger()
    ledger.dropped("zero_variance", tokens=4, rollouts=1)
    with pytest.raises(LedgerError, match="difference -4"):
        ledger.check(buffered=(3, 1), in_flight=(5, 1))


def test_a_rollout_that_changes_its_length_on_the_way_is_refused():
    ledger = Ledger()
    ledger.generated((0, 0, 0), 4)
    with pytest.raises(LedgerError, match=r"completed with 3 sampled tokens; its chunks had 4"):
        ledger.completed(rollout(0, 0, (0, 3)))


def test_a_rollout_completes_once():
    ledger = Ledger()
    done = written(ledger, 0, 0, chunks=(2,))
    ledger.completed(done)
    with pytest.raises(LedgerError, match="completed before, or never begun"):
        ledger.completed(done)


def test_a_rollout_that_failed_before_its_first_token_counts_as_a_rollout():
    ledger = Ledger()
    ledger.completed(rollout(0, 0, status=Status.PROMPT_TOO_LONG))
    assert ledger.check(buffered=(0, 1), in_flight=(0, 0)).generated == Count(0, 1)


def test_an_abandoned_attempt_is_dropped_with_its_tokens_and_the_next_is_another_rollout():
    ledger = Ledger()
    ledger.generated((0, 0, 0), 6)
    ledger.abandoned((0, 0, 0), "engine_died")
    ledger.abandoned((9, 0, 0), "engine_died")
    second = written(ledger, 0, 0, chunks=(2,), attempt=1)
    assert rollout_key(second) == (0, 0, 1)
    ledger.completed(second)
    account = ledger.check(buffered=(2, 1), in_flight=(0, 0))
    assert account.dropped == {"engine_died": Count(6, 1)}
    assert account.generated == Count(8, 2)


def test_the_trainer_accounts_for_the_whole_batch():
    ledger = Ledger()
    done = written(ledger, 0, 0, chunks=(10,))
    ledger.completed(done)
    with pytest.raises(LedgerError, match="holds 10 sampled tokens; the trainer accounts for 8 trained \\+ 1 masked"):
        ledger.trained(batch_with(done), trained_tokens=8, masked_tokens=1)


def test_a_chunk_has_no_negative_length():
    with pytest.raises(LedgerError, match="-1 tokens"):
        Ledger().generated((0, 0, 0), -1)


def test_open_rollouts_are_those_neither_completed_nor_abandoned():
    assert full_ledger().open_rollouts == {(3, 0, 0): 5}
