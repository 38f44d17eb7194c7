"""What engines record beside logprobs keeps its place on every way: sequence, wire, batch, batch file, micro-batch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.buffer.groups import rollout_bytes
from asyncrl.errors import ShapeError
from asyncrl.records import NO_EXPERT, NOTHING, KeptSets, RecordsBuilder, TokenRecords, joined
from asyncrl.rollout.chunk_stream import ChunkStream, Emission, records_of
from asyncrl.train.batch import PackedBatch, pack
from asyncrl.train.microbatch import build, layout
from asyncrl.types import Sequence, SequenceBuilder, Status
from tests.train.train_data import batch_of, rollout

LAYERS, CHOSEN = 2, 3


def sets(*rows: list[int]) -> KeptSets:
    return KeptSets.of([np.array(row, np.int32) for row in rows])


def rows_of(kept: KeptSets) -> list[list[int]]:
    return [kept.ids[start:end].tolist() for start, end in zip(kept.offsets[:-1], kept.offsets[1:], strict=True)]


def experts(*marks: int) -> np.ndarray:
    """One token for each mark, which tells it apart in every layer."""
    return np.array(marks, np.int16)[:, None, None] * 10 + np.arange(LAYERS * CHOSEN, dtype=np.int16).reshape(LAYERS, CHOSEN) % 10


def marks_of(array: np.ndarray) -> list[int]:
    return [NO_EXPERT if row[0, 0] == NO_EXPERT else int(row[0, 0]) // 10 for row in array]


def recorded(prompt: list[int], completion: list[int], *, kept: KeptSets | None = None, routed: np.ndarray | None = None) -> Sequence:
    builder = SequenceBuilder(prompt)
    builder.sampled(np.array(completion, np.int32), logprobs=np.full(len(completion), -1, np.float32), policy_version=0, kv_fresh=True,
                    turn=0, records=TokenRecords(kept, routed))
    return builder.build()


@given(st.lists(st.lists(st.integers(0, 40), max_size=4), min_size=1, max_size=8), st.data())
def test_taken_sets_are_those_of_the_places(rows: list[list[int]], data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8))
    assert rows_of(sets(*rows).take(np.array(places, np.int64))) == [rows[place] for place in places]


def test_a_token_outside_its_kept_set_is_refused_before_anything_is_appended() -> None:
    builder = SequenceBuilder([1])
    with pytest.raises(ShapeError, match="token 6 is not in the kept set of 2 ids"):
        builder.sampled(np.array([5, 6], np.int32), logprobs=np.zeros(2, np.float32), policy_version=0, kv_fresh=True, turn=0,
                        records=TokenRecords(sets([5], [4, 5])))
    assert len(builder) == 1
    assert builder.build().records.kept is None


@pytest.mark.parametrize(("records", "named"), [
    (TokenRecords(sets([5])), "2 tokens came with 1 kept sets"),
    (TokenRecords(KeptSets(np.array([1, 2], np.int32), np.array([5, 6], np.int32))), "3 ids in 2"),
    (TokenRecords(experts=experts(1, 2, 3)), "for the 2 tokens before"),
    (TokenRecords(experts=np.zeros((2, 3), np.int16)), "shape"),
])
def test_records_of_other_tokens_are_refused(records: TokenRecords, named: str) -> None:
    builder = SequenceBuilder([1])
    with pytest.raises(ShapeError, match=named):
        builder.sampled(np.array([5, 6], np.int32), logprobs=np.zeros(2, np.float32), policy_version=0, kv_fresh=True, turn=0,
                        records=records)


def test_kept_sets_stand_at_the_sampled_tokens_over_turns() -> None:
    builder = SequenceBuilder([1, 2])
    for turn, (tokens, kept) in enumerate([([5], sets([5, 9])), ([6, 7], sets([], [7]))]):
        builder.sampled(np.array(tokens, np.int32), logprobs=np.zeros(len(tokens), np.float32), policy_version=0, kv_fresh=True, turn=turn,
                        records=TokenRecords(kept))
        builder.given([3], turn=turn + 1)
    assert rows_of(builder.build().records.kept) == [[], [], [5, 9], [], [], [7], []]


def test_of_a_token_that_passes_twice_the_first_record_stays() -> None:
    builder = RecordsBuilder()
    builder.add(TokenRecords(experts=experts(1, 2, 3)), np.array([7, 7]), start=2)
    builder.add(TokenRecords(experts=experts(91, 92, 93, 4, 5)), np.array([7]), start=5)
    assert marks_of(builder.build(7).experts) == [1, 2, 3, 4, 5, NO_EXPERT, NO_EXPERT]


def test_what_was_cached_has_no_record() -> None:
    builder = RecordsBuilder()
    builder.add(TokenRecords(experts=experts(3)), np.array([7]), start=3)
    assert marks_of(builder.build(4).experts) == [NO_EXPERT, NO_EXPERT, 3, NO_EXPERT]


def test_rows_with_and_without_records_are_joined() -> None:
    whole = joined([(NOTHING, 2), (TokenRecords(sets([4], [])), 2), (TokenRecords(experts=experts(8)), 1)])
    assert rows_of(whole.kept) == [[], [], [4], [], []]
    assert marks_of(whole.experts) == [NO_EXPERT] * 4 + [8]
    assert joined([(NOTHING, 2), (NOTHING, 3)]).arrays() == {}
    with pytest.raises(ShapeError, match="one model"):
        joined([(TokenRecords(experts=experts(1)), 1), (TokenRecords(experts=experts(1)[:, :1]), 1)])


def test_a_message_gives_each_row_its_own_records() -> None:
    sent = []
    stream = ChunkStream(SimpleNamespace(reply=lambda *parts, **more: sent.append((parts, more))))  # type: ignore[arg-type]
    stream.opened(1)
    stream.send([Emission("a", [5, 6], [-1.0, -1.0], True, None, records=TokenRecords(sets([5, 8], [6]), experts(1, 2, 3))),
                 Emission("b", [7], [-1.0], True, None),
                 Emission("c", [], [], True, Status.STOP),
                 Emission("d", [9], [-1.0], True, Status.STOP, records=TokenRecords(sets([9, 1]), experts(4)))], version=0)
    (_, body), arrays = sent[0][0], sent[0][1]["arrays"]
    first, second, third, fourth = records_of(body["rows"], arrays)
    assert (rows_of(first.kept), marks_of(first.experts)) == ([[5, 8], [6]], [1, 2, 3])
    assert second.arrays() == third.arrays() == {}
    assert (rows_of(fourth.kept), marks_of(fourth.experts)) == ([[9, 1]], [4])


def test_a_message_without_records_has_no_array_for_them() -> None:
    sent = []
    stream = ChunkStream(SimpleNamespace(reply=lambda *parts, **more: sent.append(more)))  # type: ignore[arg-type]
    stream.opened(1)
    stream.send([Emission("a", [5], [-1.0], True, None)], version=0)
    assert sent[0]["arrays"].keys() == {"tokens", "logprobs"}


def test_a_batch_file_holds_the_records_and_nothing_without_them(tmp_path: Path) -> None:
    with_records = pack(batch_of(rollout(0, 0, recorded([1, 2], [5, 6], kept=sets([5, 8], []), routed=experts(1, 2, 3))),
                                 rollout(0, 1, recorded([1, 2], [7]))))
    with_records.save(tmp_path / "with")
    loaded = PackedBatch.load(tmp_path / "with")
    assert rows_of(loaded.records.kept) == [[], [], [5, 8], [], [], [], []]
    assert marks_of(loaded.records.experts) == [1, 2, 3] + [NO_EXPERT] * 4
    assert loaded.records.experts.dtype == np.int16
    pack(batch_of(rollout(0, 0, recorded([1, 2], [5])))).save(tmp_path / "without")
    assert PackedBatch.load(tmp_path / "without").records.arrays() == {}


@pytest.mark.parametrize(("second", "rows", "marks"), [(2, [1, 2, 6, 7], [31, 2, 33, 34]), (32, [1, 2, 2, 6, 7], [31, 2, 32, 33, 34])])
def test_a_row_that_a_group_shares_has_the_first_record_there_is(second: int, rows: list[int], marks: list[int]) -> None:
    """Of two sequences with one prompt the first, by length, has no record of its first token; two that differ share no row."""
    missing = experts(1, 2)
    missing[0] = NO_EXPERT
    batch = pack(batch_of(rollout(0, 0, recorded([1, 2], [5], routed=missing)),
                          rollout(0, 1, recorded([1, 2], [6, 7, 8], kept=sets([6], [], [8, 9]), routed=experts(31, second, 33, 34)))))
    whole = layout(batch.tokens, cu_seqlens=batch.cu_seqlens, targets=batch.loss_mask, temperatures=batch.temperatures,
                   group_ids=batch.group_ids[batch.rollout_ids], records=batch.records)
    micro = build(whole, (0, 1))
    assert micro.tokens.tolist() == rows
    assert marks_of(micro.experts) == marks
    assert micro.targets.tolist() == [5, 6, 7, 8]
    assert rows_of(micro.kept) == [[], [6], [], [8, 9]]


def test_stored_bytes_count_the_records() -> None:
    plain, full = recorded([1], [5]), recorded([1], [5], kept=sets([5, 6]), routed=experts(1))
    assert rollout_bytes(rollout(0, 0, full)) - rollout_bytes(rollout(0, 0, plain)) == 2 * 4 + 2 * 4 + 2 * LAYERS * CHOSEN * 2
