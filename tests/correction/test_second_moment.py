import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.correction.ratios import pushes_away
from asyncrl.correction.second_moment import second_moment_mask, second_moment_tau

numbers = st.lists(st.floats(-3, 3).map(lambda x: round(x, 3)), max_size=12)
limits = st.sampled_from([1e-3, 0.04, 0.5, 4.0])


def tensor(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def keep(values: list[float], *, limit: float, mask: list[bool] | None = None) -> list[bool]:
    chosen = torch.ones(len(values), dtype=torch.bool) if mask is None else torch.tensor(mask)
    return second_moment_mask(tensor(values), mask=chosen, limit=limit).tolist()


def test_the_largest_squares_go_until_the_mean_of_the_rest_is_below_the_limit() -> None:
    # squares 0.01, 0.04, 0.09, 1: means 0.01, 0.025, 0.0467, …
    assert keep([0.1, -1.0, 0.2, 0.3], limit=0.04) == [True, False, True, False]
    assert keep([0.1, -1.0, 0.2, 0.3], limit=0.05) == [True, False, True, True]


def test_the_limit_itself_is_too_much() -> None:
    assert keep([0.5, 0.25], limit=0.15625) == [False, True]  # the mean of 0.25 and 0.0625, exact in binary


def test_something_always_stays_and_equals_share_their_fate() -> None:
    assert keep([2.0, -1.0, 1.0], limit=0.04) == [False, True, True]
    assert keep([0.1, 1.0, -1.0], limit=0.4) == [True, False, False]  # with one of the two the mean would be 0.505
    assert keep([], limit=0.04) == []


def test_garbage_under_the_mask_is_not_seen_and_nan_is_kept() -> None:
    assert keep([math.nan, 0.1, math.inf, 1.0], limit=0.04, mask=[False, True, False, True]) == [False, True, False, False]
    assert keep([math.nan, 0.1, 1.0], limit=0.04) == [True, True, False]


@given(numbers, limits, st.randoms())
def test_what_stays_is_the_largest_set_that_fits_in_any_order(values: list[float], limit: float, random: object) -> None:
    stays = keep(values, limit=limit)
    squares = np.square(values)
    if stays and not all(stays):
        kept, dropped = squares[np.array(stays)], squares[~np.array(stays)]
        assert kept.max() < dropped.min()
        assert kept.mean() < limit or kept.max() == squares.min()
        enlarged = np.append(kept, squares[squares == dropped.min()])
        assert enlarged.mean() >= limit * (1 - 1e-9) or kept.max() == squares.min()
    order = list(range(len(values)))
    random.shuffle(order)
    assert keep([values[n] for n in order], limit=limit) == [stays[n] for n in order]


def test_tau_by_hand() -> None:
    """Squares 0.01, 0.04, 0.25 of harmful tokens, budget 0.12: 0.01 + 0.04 + τ² = 0.12."""
    log_ratio, advantages = tensor([0.1, -0.2, 0.5, 3.0]), tensor([1.0, -1.0, 2.0, -1.0])
    mask = torch.ones(4, dtype=torch.bool)
    assert pushes_away(log_ratio, advantages=advantages, mask=mask).tolist() == [True, True, True, False]
    tau = second_moment_tau(log_ratio, advantages=advantages, mask=mask, limit=0.04)
    assert tau.item() == pytest.approx(math.sqrt(0.07), rel=1e-12)
    of_code = second_moment_tau(log_ratio, advantages=advantages, mask=mask, limit=0.04, exact=False)
    assert of_code.item() == pytest.approx(0.2, rel=1e-12)  # 0.01 + 2 · 0.04 = 0.09 is below 0.12, 0.3 is not


@given(numbers, numbers, limits)
def test_tau_spends_the_budget_to_the_last(values: list[float], signs: list[float], limit: float) -> None:
    n = min(len(values), len(signs))
    log_ratio, advantages, mask = tensor(values[:n]), tensor(signs[:n]), torch.ones(n, dtype=torch.bool)
    squares = np.square(log_ratio[pushes_away(log_ratio, advantages=advantages, mask=mask)].numpy())
    tau = second_moment_tau(log_ratio, advantages=advantages, mask=mask, limit=limit).item()
    if squares.sum() <= limit * len(squares):
        assert tau == math.inf
    else:
        assert np.minimum(squares, tau**2).sum() == pytest.approx(limit * len(squares), rel=1e-9)
