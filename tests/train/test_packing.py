import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.train.batch import pack
from asyncrl.train.microbatch import Layout, build, layout
from asyncrl.train.packing import plan
from tests.train.train_data import batch_of, random_batch, rollout, sequence


def spread(costs: list[int], *, ranks: int, microbatch_tokens: int, group_ids: list[int] | None = None) -> tuple:
    ids = list(range(len(costs))) if group_ids is None else group_ids
    return plan(np.array(costs), shared=np.zeros(len(costs), np.int64), group_ids=np.array(ids), ranks=ranks,
                microbatch_tokens=microbatch_tokens)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 3)), min_size=1, max_size=30), st.integers(1, 4), st.integers(20, 120))
def test_every_sequence_is_computed_once_and_ranks_have_equal_counts(rows: list, ranks: int, budget: int) -> None:
    costs, groups = [cost for cost, _ in rows], [group for _, group in rows]
    plans = spread(costs, ranks=ranks, microbatch_tokens=budget, group_ids=groups)
    assert len({len(microbatches) for microbatches in plans}) == 1
    computed = sorted(n for microbatches in plans for sequences in microbatches for n in sequences)
    assert computed == [n for n, cost in enumerate(costs) if cost]
    for microbatches in plans:
        for sequences in microbatches:
            assert len(sequences) <= 1 or sum(costs[n] for n in sequences) <= budget
    assert plans == spread(costs, ranks=ranks, microbatch_tokens=budget, group_ids=groups)


def test_unequal_loads_get_equal_counts_of_microbatches() -> None:
    first, second = spread([95, 95, 95, 95, 95, 100], ranks=2, microbatch_tokens=100)
    assert len(first) == len(second) == 3


def test_fewer_sequences_than_ranks_leave_dummies() -> None:
    assert sorted(spread([10], ranks=3, microbatch_tokens=100)) == [((),), ((),), ((0,),)]


def test_work_is_spread_even_when_one_microbatch_would_hold_it() -> None:
    first, second = spread([9] * 64, ranks=2, microbatch_tokens=4096, group_ids=[n // 16 for n in range(64)])
    assert sum(len(sequences) for sequences in first) == sum(len(sequences) for sequences in second) == 32


def test_a_sequence_longer_than_the_budget_is_alone() -> None:
    (microbatches,) = spread([300, 10, 20], ranks=1, microbatch_tokens=100)
    assert (0,) in microbatches
    assert (1, 2) in microbatches


def whole_of(*sequences: tuple[list[int], list[int]], group_ids: list[int]) -> Layout:
    packed = pack(batch_of(*(rollout(group, n, sequence(*row)) for n, (row, group) in enumerate(zip(sequences, group_ids, strict=True)))))
    return layout(packed.tokens, cu_seqlens=packed.cu_seqlens, targets=packed.loss_mask, temperatures=packed.temperatures,
                  group_ids=packed.group_ids[packed.rollout_ids])


def test_predictions_never_cross_a_sequence() -> None:
    whole = whole_of(([10, 11], [12]), ([20], [21]), group_ids=[0, 1])
    microbatch = build(whole, (0, 1))
    # the shorter first; the last token of each is predicted, never an input
    assert microbatch.tokens.tolist() == [20, 10, 11]
    assert microbatch.positions.tolist() == [0, 0, 1]
    assert microbatch.segments.runs == ((1, 1), (1, 2))
    assert microbatch.sources.tolist() == [0, 2]
    assert microbatch.targets.tolist() == [21, 12]
    assert microbatch.places.tolist() == [4, 2]
    assert microbatch.cu_targets.tolist() == [0, 1, 2]


def test_a_shared_prompt_has_one_row_a_token() -> None:
    whole = whole_of(([7, 8, 9], [1, 2]), ([7, 8, 9], [3, 4]), group_ids=[5, 5])
    assert whole.costs.tolist() == [4, 4]
    assert whole.shared.tolist() == [3, 3]
    microbatch = build(whole, (0, 1))
    assert microbatch.tokens.tolist() == [7, 8, 9, 1, 3]
    assert microbatch.segments.expand.tolist() == [0, 1, 2, 3, 0, 1, 2, 4]
    assert microbatch.segments.collapse.tolist() == [0, 1, 2, 3, 7]
    assert microbatch.sources.tolist() == [2, 3, 2, 4]
    assert microbatch.targets.tolist() == [1, 2, 3, 4]


def test_the_same_tokens_in_another_group_are_not_shared() -> None:
    whole = whole_of(([7, 8], [1, 2]), ([7, 8], [1, 2]), group_ids=[0, 1])
    assert build(whole, (0, 1)).segments.expand is None


def test_a_dummy_predicts_nothing() -> None:
    dummy = build(whole_of(([7], [1]), group_ids=[0]), ())
    assert (len(dummy.tokens), len(dummy.targets)) == (1, 0)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000))
def test_expanding_and_collapsing_rows_gives_the_tokens_back(seed: int) -> None:
    packed = pack(random_batch(seed))
    whole = layout(packed.tokens, cu_seqlens=packed.cu_seqlens, targets=packed.loss_mask, temperatures=packed.temperatures,
                   group_ids=packed.group_ids[packed.rollout_ids])
    microbatch = build(whole, tuple(range(len(whole.costs))))
    expanded = microbatch.tokens[microbatch.segments.expand]
    order = np.lexsort((np.arange(len(whole.costs)), whole.costs))
    assert expanded.tolist() == [token for n in order for token in packed.tokens[packed.cu_seqlens[n]:][:whole.costs[n]].tolist()]
    assert np.array_equal(expanded[microbatch.segments.collapse], microbatch.tokens)
    assert np.array_equal(packed.tokens[microbatch.places], microbatch.targets)
    assert np.array_equal(microbatch.tokens[microbatch.sources], packed.tokens[microbatch.places - 1])
