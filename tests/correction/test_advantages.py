from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from asyncrl.correction.advantages import dr_grpo, grpo, maxrl, no_signal, opo, reinforce_plus_plus_baseline, rloo
from asyncrl.errors import NonFiniteError, ShapeError

Estimator = Callable[..., np.ndarray]
NAN, INF = float("nan"), float("inf")


def weighted(estimate: Estimator) -> Estimator:
    """One that needs lengths, as one that needs none: every rollout is 3 tokens long."""
    def of_three_tokens(rewards: object, **settings: object) -> np.ndarray:
        return estimate(rewards, lengths=np.full(len(rewards), 3), **settings)

    return of_three_tokens


BY_GROUP = [grpo, dr_grpo, rloo, maxrl, weighted(opo)]
"""What a group gets depends on it alone."""
ESTIMATORS = [*BY_GROUP, weighted(reinforce_plus_plus_baseline)]
NAMES = ["grpo", "dr_grpo", "rloo", "maxrl", "opo", "reinforce_plus_plus_baseline"]


def test_grpo_divides_by_the_std_of_n_minus_one_or_of_n() -> None:
    rewards, ids = [3.0, 1.0, 0.0, 0.0], [7, 7, 7, 7]
    assert_allclose(grpo(rewards, group_ids=ids), [1.41421256, 0.0, -0.707106281, -0.707106281], atol=1e-8)
    assert_allclose(grpo(rewards, group_ids=ids, unbiased_std=False), [1.63299183, 0.0, -0.816495914, -0.816495914], atol=1e-8)


def test_dr_grpo_subtracts_the_mean_alone() -> None:
    assert_allclose(dr_grpo([3.0, 1.0, 0.0, 0.0], group_ids=[7, 7, 7, 7]), [2.0, 0.0, -1.0, -1.0], atol=1e-12)


def test_rloo_subtracts_the_mean_of_the_others() -> None:
    assert_allclose(rloo([3.0, 1.0, 0.0, 0.0], group_ids=[7, 7, 7, 7]), [8 / 3, 0.0, -4 / 3, -4 / 3], atol=1e-12)


def test_maxrl_divides_by_the_mean_and_leaves_out_groups_without_one() -> None:
    """One success among four weighs 3 = (1 − ¼) / ¼; three among four weigh a third each."""
    assert_allclose(maxrl([0.0, 0.0, 1.0, 0.0], group_ids=[5] * 4), [-1.0, -1.0, 3.0, -1.0], atol=1e-12)
    assert_allclose(maxrl([1.0, 1.0, 0.0, 1.0], group_ids=[5] * 4), [1 / 3, 1 / 3, -1.0, 1 / 3], atol=1e-12)
    assert maxrl([-1.0, 1.0, -3.0, 2.0], group_ids=[0, 0, 1, 1]).tolist() == [0.0] * 4


def test_maxrl_is_the_mean_over_successes_less_the_mean_over_all() -> None:
    """The paper's estimator: Σ over the k successes of s / k − Σ over all n of s / n, for scores s."""
    rewards, scores = np.array([1.0, 0.0, 1.0, 0.0, 0.0]), np.array([0.3, -1.2, 2.0, 0.7, 5.0])
    wanted = scores[rewards > 0].mean() - scores.mean()
    assert (maxrl(rewards, group_ids=[0] * 5) * scores).mean() == pytest.approx(wanted, rel=1e-12)


def test_opo_weighs_the_baseline_by_length() -> None:
    got = opo([1.0, 0.0, 1.0, 0.0], group_ids=[3] * 4, lengths=[2.0, 4.0, 6.0, 8.0])
    assert_allclose(got, [0.6, -0.4, 0.6, -0.4], atol=1e-12)


def test_opo_of_a_group_that_wrote_nothing_is_zero() -> None:
    """A row without tokens has no say in the baseline; rows of another group do not notice."""
    got = opo([1.0, 0.0, 1.0, 0.0], group_ids=[0, 0, 1, 1], lengths=[0, 0, 0, 5])
    assert_allclose(got, [0.0, 0.0, 1.0, 0.0], atol=1e-12)


def test_opo_is_the_baseline_of_least_variance_for_gradients_that_grow_with_length() -> None:
    """Σ l (r − b)² is least at its b: it falls on neither side."""
    rewards, lengths = np.array([1.0, 0.0, 0.5, 2.0]), np.array([3, 1, 7, 2])
    centred = opo(rewards, group_ids=[0] * 4, lengths=lengths)
    energy = [float((lengths * (centred + shift) ** 2).sum()) for shift in (-0.01, 0.0, 0.01)]
    assert energy[1] < min(energy[0], energy[2])


def test_reinforce_plus_plus_with_baseline_has_one_scale_for_all_groups() -> None:
    """Deviations −1, 1 and −2, 2; each token counts, so mean 0.5 and variance 54 / 11 over 2, 2, 2 and 6 tokens."""
    got = reinforce_plus_plus_baseline([0.0, 2.0, 1.0, 5.0], group_ids=[0, 0, 1, 1], lengths=[2, 2, 2, 6])
    tokens = np.repeat([-1.0, 1.0, -2.0, 2.0], [2, 2, 2, 6])
    wanted = (np.array([-1.0, 1.0, -2.0, 2.0]) - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
    assert_allclose(got, wanted, rtol=1e-12)
    assert (got * [2, 2, 2, 6]).sum() == pytest.approx(0.0, abs=1e-9)


def test_reinforce_plus_plus_with_baseline_does_not_push_groups_of_equal_rewards() -> None:
    """Whitening alone would give them −mean / std of the batch."""
    got = reinforce_plus_plus_baseline([1.0, 0.0, 7.0, 7.0, 4.0], group_ids=[0, 0, 1, 1, 2], lengths=[9, 1, 5, 5, 5])
    assert got[2:].tolist() == [0.0, 0.0, 0.0]
    assert got[0] > 0.0 > got[1]


@pytest.mark.parametrize("estimate", [opo, reinforce_plus_plus_baseline], ids=["opo", "reinforce_plus_plus_baseline"])
def test_lengths_are_checked_where_they_count(estimate: Estimator) -> None:
    valid = [True, True, False]
    clean = estimate([1.0, 0.0, 3.0], group_ids=[0] * 3, lengths=[4, 2, 1], valid=valid)
    assert estimate([1.0, 0.0, 3.0], group_ids=[0] * 3, lengths=[4, 2, NAN], valid=valid).tolist() == clean.tolist()
    for length in (-1.0, NAN, INF):
        with pytest.raises(ShapeError, match=r"lengths\[1\]"):
            estimate([1.0, 0.0, 3.0], group_ids=[0] * 3, lengths=[4, length, 1], valid=valid)
    with pytest.raises(ShapeError, match="lengths must be"):
        estimate([1.0, 0.0], group_ids=[0, 0], lengths=[1])


def test_an_error_row_leaves_the_baseline_and_gets_zero() -> None:
    """Rewards [1, 3, 2] count; the infrastructure failure is no reward of 0."""
    valid = [True, True, True, False]
    assert_allclose(dr_grpo([1.0, 3.0, 2.0, 0.0], group_ids=[0] * 4, valid=valid), [-1.0, 1.0, 0.0, 0.0], atol=1e-12)
    assert_allclose(rloo([1.0, 3.0, 2.0, NAN], group_ids=[0] * 4, valid=valid), [-1.5, 1.5, 0.0, 0.0], atol=1e-12)


def test_a_nan_row_that_is_not_valid_poisons_nobody() -> None:
    got = grpo([1.0, NAN, 3.0], group_ids=[0, 0, 0], valid=[True, False, True], unbiased_std=False)
    assert_allclose(got, [-1.0, 0.0, 1.0], atol=2e-6)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("estimate", ESTIMATORS, ids=NAMES)
def test_a_non_finite_valid_reward_is_an_error_with_its_row_and_group(estimate: Estimator, value: float) -> None:
    with pytest.raises(NonFiniteError, match=r"rewards\[1\] = .* in group 42"):
        estimate([1.0, value, 3.0], group_ids=[41, 42, 42])


@pytest.mark.parametrize("estimate", ESTIMATORS, ids=NAMES)
def test_singletons_and_groups_without_valid_rows_get_zero(estimate: Estimator) -> None:
    got = estimate([1.0, 5.0, 2.0, NAN], group_ids=[1, 2, 2, 3], valid=[True, True, False, False])
    assert got.tolist() == [0.0, 0.0, 0.0, 0.0]
    assert estimate([], group_ids=[]).tolist() == []


@pytest.mark.parametrize("estimate", ESTIMATORS, ids=NAMES)
def test_equal_rewards_get_exactly_zero(estimate: Estimator) -> None:
    """Sixteen times 0.7 in float32 has a std of 6e-8: divided by it, noise would be an advantage of 0.06."""
    rewards = np.full(16, 0.7, np.float32)
    assert estimate(rewards, group_ids=np.zeros(16, int)).tolist() == [0.0] * 16
    nearly = [0.1 + 0.2, 0.3, np.float32(0.3)]
    assert estimate(nearly, group_ids=[0, 0, 0]).tolist() == [0.0] * 3


def test_groups_without_signal_are_flagged() -> None:
    flags = no_signal([0.7, 0.7, 1.0, 0.0, 3.0, 1.0, NAN], group_ids=[0, 0, 1, 1, 2, 3, 3], valid=[True] * 6 + [False])
    assert flags.tolist() == [True, True, False, False, True, True, True]


def test_the_tolerance_is_a_choice() -> None:
    assert dr_grpo([0.0, 1e-3], group_ids=[0, 0], tolerance=1e-2).tolist() == [0.0, 0.0]
    assert_allclose(dr_grpo([0.0, 1e-9], group_ids=[0, 0], tolerance=0.0), [-5e-10, 5e-10])


@pytest.mark.parametrize("estimate", BY_GROUP, ids=NAMES[:-1])
def test_groups_are_told_by_id_and_not_by_position(estimate: Estimator) -> None:
    """Sizes 2, 1, 3 interleaved: as if each group had been computed alone."""
    got = estimate([1.0, 9.0, 5.0, 2.0, 3.0, 4.0], group_ids=[30, 10, 20, 10, 30, 10])
    wanted = np.zeros(6)
    wanted[[0, 4]] = estimate([1.0, 3.0], group_ids=[0, 0])
    wanted[[1, 3, 5]] = estimate([9.0, 2.0, 4.0], group_ids=[0, 0, 0])
    assert_allclose(got, wanted, rtol=1e-12)


def test_a_remainder_group_of_one_is_not_divided_by_epsilon() -> None:
    assert grpo([1.0, 0.0, 1.0, 0.0, 1.0], group_ids=[0, 0, 1, 1, 2])[4] == 0.0


@given(st.lists(st.tuples(st.floats(-10, 10, width=32), st.integers(0, 3), st.booleans()), min_size=1, max_size=20), st.randoms())
def test_any_order_gives_the_same_advantages_and_valid_rows_sum_to_zero(rows: list[tuple[float, int, bool]], random: object) -> None:
    order = list(range(len(rows)))
    random.shuffle(order)
    for estimate in ESTIMATORS:
        def of(chosen: list[int], estimate: Estimator = estimate) -> np.ndarray:
            picked = [rows[i] for i in chosen]
            return estimate([r for r, _, _ in picked], group_ids=[g for _, g, _ in picked], valid=np.array([v for _, _, v in picked]))

        plain, shuffled = of(list(range(len(rows)))), of(order)
        assert_allclose(shuffled, plain[order], rtol=1e-7, atol=1e-7)
        for group in {g for _, g, _ in rows} if estimate in BY_GROUP else ():
            assert abs(sum(a for a, (_, g, _) in zip(plain, rows, strict=True) if g == group)) < 1e-6
        assert all(a == 0.0 for a, (_, _, v) in zip(plain, rows, strict=True) if not v)


def test_lengths_that_differ_are_refused() -> None:
    with pytest.raises(ShapeError):
        grpo([1.0, 2.0], group_ids=[0])
    with pytest.raises(ShapeError):
        grpo([1.0, 2.0], group_ids=[0, 0], valid=[1, 0])
