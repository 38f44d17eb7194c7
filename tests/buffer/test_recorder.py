import pytest

from asyncrl.buffer.recorder import BatchRecord, Event, MemoryRecorder
from asyncrl.buffer.view import Slot
from asyncrl.types import Batch, Prompt, RolloutGroup
from tests.buffer.buffer_fakes import rollout


def test_events_keep_their_order():
    recorder = MemoryRecorder()
    group = RolloutGroup(4, Prompt(), (rollout(4, 0, (0, 2)),))
    recorder.admitted(Slot(4, Prompt(), 0))
    recorder.partial((4, 0, 0), group.rollouts[0].sequences)
    recorder.scored(group)
    recorder.dropped(5, "zero_variance")
    recorder.batch_recorded(BatchRecord.of(Batch(2, (group,)), seed=7, learning_rate=1e-3))
    recorder.step_done(2)
    assert recorder.events == (Event(0, "admitted", 4), Event(1, "partial", (4, 0, 0), "2 tokens"), Event(2, "scored", 4),
                               Event(3, "dropped", 5, "zero_variance"), Event(4, "batch_recorded", 2), Event(5, "step_done", 2))


def test_a_batch_is_open_until_its_step_is_done():
    recorder = MemoryRecorder()
    records = [BatchRecord(version, (2 * version, 2 * version + 1), seed=0, learning_rate=1e-3) for version in (3, 4)]
    for record in records:
        recorder.batch_recorded(record)
    assert recorder.open_batches == tuple(records)
    recorder.step_done(3)
    assert recorder.open_batches == (records[1],)
    with pytest.raises(KeyError):
        recorder.step_done(3)


def test_memory_is_bounded_and_numbers_go_on():
    recorder = MemoryRecorder(max_events=2)
    for group_id in range(5):
        recorder.dropped(group_id, "test")
    assert [(event.number, event.subject) for event in recorder.events] == [(3, 3), (4, 4)]
