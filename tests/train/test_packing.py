import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.train.batch import pack
from asyncrl.train.microbatch import Layout, build, layout
from asyncrl.train.packing import PAIR_COST, plan
from tests.train.train_data import batch_of, random_batch, rollout, sequence


def spread(costs: list[int], *, ranks: int, microbatch_tokens: int, group_ids: list[int] | None = None) -> tuple:
    ids = list(range(len(costs))) if group_ids is None else group_ids
    return plan(np.array(costs), shared=np.zeros(len(costs), np.int64), group_ids=np.array(ids), ranks=ranks,
                microbatch_tokens=microbatch_tokens).ranks


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


LOGNORMAL = st.tuples(st.integers(0, 10_000), st.integers(64, 400), st.sampled_from([200, 2000]))
"""Seed, sequences, mean tokens."""


def lognormal(seed: int, count: int, mean: int) -> np.ndarray:
    """Lengths as rollouts have them: many short ones, a few of 8k."""
    return np.random.default_rng(seed).lognormal(np.log(mean) - 0.32, 0.8, count).astype(np.int64).clip(1, 8192)


@settings(max_examples=60, deadline=None)
@given(LOGNORMAL, st.sampled_from([1, 2, 4, 8]), st.sampled_from([8192, 16384, 32768]))
def test_lognormal_lengths_leave_under_3_percent_of_the_budget_empty_and_ranks_even(drawn: tuple, ranks: int, budget: int) -> None:
    costs = lognormal(*drawn)
    packing = plan(costs, shared=np.zeros_like(costs), group_ids=np.arange(len(costs)), ranks=ranks, microbatch_tokens=budget)
    counts = {len(microbatches) for microbatches in packing.ranks}
    (count,) = counts
    computed = sorted(n for microbatches in packing.ranks for sequences in microbatches for n in sequences)
    assert computed == list(range(len(costs)))
    loads = np.array([[costs[list(sequences)].sum() for sequences in microbatches] for microbatches in packing.ranks])
    assert loads.max() <= budget
    # as good as any packing into bins 3% smaller
    least = math.ceil(int(costs.sum()) / (ranks * budget))
    assert least <= count <= math.ceil(int(costs.sum()) / (0.97 * ranks * budget))
    assert packing.waste == max(0.0, 1 - int(costs.sum()) / (ranks * budget * (count - 1)) if count > 1 else 0.0) < 0.03
    work = np.array([[costs[list(s)].sum() + PAIR_COST * (costs[list(s)] * (costs[list(s)] + 1)).sum() / 2 for s in microbatches]
                     for microbatches in packing.ranks])
    assert packing.imbalance == pytest.approx(1 - work.sum() / (ranks * work.max(axis=0).sum()))
    # one sequence may be more work than a rank's share, and full budgets leave no choice
    longest = float(costs.max() + PAIR_COST * costs.max() ** 2 / 2)
    share, fill = work.sum() / (ranks * count), int(costs.sum()) / (ranks * count * budget)
    assert packing.imbalance < 0.05 or longest > 0.95 * share or fill > 0.95
    again = plan(costs, shared=np.zeros_like(costs), group_ids=np.arange(len(costs)), ranks=ranks, microbatch_tokens=budget)
    assert again == packing


@settings(max_examples=30, deadline=None)
@given(LOGNORMAL, st.integers(2, 16), st.integers(1, 1000), st.sampled_from([1, 4]))
def test_keeping_groups_together_saves_rows_and_costs_one_forward_at_most(drawn: tuple, group_size: int, prompt: int, ranks: int) -> None:
    completions = lognormal(*drawn)[:len(lognormal(*drawn)) // group_size * group_size]
    group_ids, costs = np.arange(len(completions)) // group_size, completions + prompt
    shared = np.full_like(costs, prompt)
    packing = plan(costs, shared=shared, group_ids=group_ids, ranks=ranks, microbatch_tokens=16384)
    alone = plan(costs, shared=np.zeros_like(costs), group_ids=np.arange(len(costs)), ranks=ranks, microbatch_tokens=16384)
    bins = [list(sequences) for microbatches in packing.ranks for sequences in microbatches if sequences]
    rows = sum(int(completions[members].sum()) + prompt * len(np.unique(group_ids[members])) for members in bins)
    assert all(int(completions[members].sum()) + prompt * len(np.unique(group_ids[members])) <= 16384 for members in bins)
    assert len(packing.ranks[0]) <= len(alone.ranks[0]) + 1
    assert rows <= int(costs.sum())
    count = len(packing.ranks[0])
    assert packing.waste == pytest.approx(max(0.0, 1 - rows / (ranks * 16384 * (count - 1))) if count > 1 else 0.0)


def test_a_long_sequence_counts_for_more_than_its_tokens() -> None:
    """By tokens, one of 4,000 and one of 1,000 are half of all; by work, the long one alone is."""
    lengths = np.array([4000] + [1000] * 6)

    def shares(pair_cost: float) -> list[int]:
        packing = plan(lengths, shared=np.zeros(7, np.int64), group_ids=np.arange(7), ranks=2, microbatch_tokens=8192, pair_cost=pair_cost)
        return sorted(len(sequences) for (sequences,) in packing.ranks)

    assert (shares(0.0), shares(1 / 2000)) == ([2, 5], [1, 6])


def test_what_ranks_wait_is_the_sum_over_rounds_of_the_slowest() -> None:
    packing = plan(np.array([100, 50, 100]), shared=np.zeros(3, np.int64), group_ids=np.arange(3), ranks=2, microbatch_tokens=100,
                   pair_cost=0.0)
    assert packing.ranks == (((0,), (1,)), ((2,), ()))
    assert packing.imbalance == pytest.approx(1 - 250 / (2 * (100 + 50)))
    assert packing.waste == 0.0


def test_a_microbatch_that_a_perfect_packing_would_not_need_is_waste() -> None:
    """Three of 60 fill no two budgets of 100, though 180 tokens would."""
    packing = plan(np.array([60] * 3), shared=np.zeros(3, np.int64), group_ids=np.arange(3), ranks=1, microbatch_tokens=100)
    assert len(packing.ranks[0]) == 3
    assert packing.waste == pytest.approx(1 - 180 / 200)


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
