import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from asyncrl.correction.whitening import Moments, whiten
from asyncrl.errors import NonFiniteError, ShapeError

NAN = float("nan")
floats = st.floats(-1e3, 1e3, width=32)
rows = st.lists(st.tuples(floats, st.booleans()), max_size=25)


def test_whitened_values_have_mean_zero_and_unbiased_variance_one() -> None:
    values = np.array([3.0, -1.0, 4.0, 0.5])
    got = whiten(values, counts=np.ones(4, bool))
    assert_allclose(got, (values - 1.625) / np.sqrt(values.var(ddof=1) + 1e-8), rtol=1e-12)
    assert got.mean() == pytest.approx(0.0, abs=1e-12)
    assert got.var(ddof=1) == pytest.approx(1.0, abs=1e-7)


def test_epsilon_is_inside_the_root() -> None:
    assert_allclose(whiten([0.0, 2.0], counts=[True, True], epsilon=2.0), [-0.5, 0.5], rtol=1e-12)


def test_what_does_not_count_is_not_looked_at_and_gets_zero() -> None:
    got = whiten([1.0, NAN, 3.0, float("inf")], counts=[True, False, True, False], epsilon=0.0)
    assert_allclose(got, [-np.sqrt(0.5), 0.0, np.sqrt(0.5), 0.0], rtol=1e-12)


def test_a_value_counts_as_often_as_it_is_said_to() -> None:
    repeated = whiten(np.repeat([1.0, 5.0, 2.0], [2, 1, 4]), counts=np.ones(7, bool))
    assert_allclose(whiten([1.0, 5.0, 2.0, 9.0], counts=[2, 1, 4, 0]), [*repeated[[0, 2, 3]], 0.0], rtol=1e-12)


@pytest.mark.parametrize("values", [[], [4.0], [0.1 + 0.2, 0.3, float(np.float32(0.3))]])
def test_nothing_one_value_and_equal_values_give_exactly_zero(values: list[float]) -> None:
    assert whiten(values, counts=np.ones(len(values), bool)).tolist() == [0.0] * len(values)


def test_a_large_mean_does_not_eat_the_variance() -> None:
    """Sums of squares of 1e8 + {0, 1} would have lost it in float64."""
    assert_allclose(whiten([1e8, 1e8 + 1.0], counts=[1, 1], epsilon=0.0), [-np.sqrt(0.5), np.sqrt(0.5)], rtol=1e-12)


@given(st.tuples(rows, rows, rows))
def test_the_moments_of_shares_add_up_to_those_of_the_batch(shares: tuple[list[tuple[float, bool]], ...]) -> None:
    whole = [row for share in shares for row in share]
    values, mask = np.array([v for v, _ in whole]), np.array([m for _, m in whole], bool)
    together = Moments.of(values, counts=mask)
    apart = [Moments.of([v for v, _ in share], counts=[m for _, m in share]) for share in shares]
    added = apart[0] + apart[1] + apart[2]
    assert (added.count, added.low, added.high) == (together.count, together.low, together.high)
    assert added.mean == pytest.approx(together.mean, rel=1e-9, abs=1e-9)
    assert added.squares == pytest.approx(together.squares, rel=1e-9, abs=1e-6)
    if mask.sum() > 1:
        assert together.variance == pytest.approx(values[mask].var(ddof=1), rel=1e-9, abs=1e-9)
    alone = [whiten([v for v, _ in share], counts=[m for _, m in share], moments=added) for share in shares]
    assert_allclose(np.concatenate(alone), whiten(values, counts=mask), rtol=1e-6, atol=1e-6)


def test_a_value_that_counts_must_be_finite() -> None:
    with pytest.raises(NonFiniteError, match=r"values\[1\] = nan"):
        whiten([1.0, NAN], counts=[True, True])


def test_counts_of_another_shape_or_below_zero_are_refused() -> None:
    with pytest.raises(ShapeError, match="must be"):
        whiten([1.0, 2.0], counts=[True])
    for count in (-1.0, NAN, float("inf")):
        with pytest.raises(ShapeError, match="counts"):
            whiten([1.0, 2.0], counts=[1.0, count])
