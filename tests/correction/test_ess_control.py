import doctest

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.correction import ess_control
from asyncrl.correction.ess_control import EssSums, ess_scale, learning_rate_scale
from asyncrl.errors import ConfigError, NonFiniteError, ShapeError

WEIGHTS = torch.tensor([0.2, 0.5, 1.0, 4.0], dtype=torch.float64)
shares = st.lists(st.lists(st.floats(0, 1e6), max_size=6), min_size=1, max_size=5)


def test_the_scale_is_the_root_of_the_ess_share() -> None:
    """(Σw)² / Σw² = 5.7² / 17.29."""
    sums = EssSums.of(WEIGHTS)
    assert sums.ess == pytest.approx(32.49 / 17.29, rel=1e-12)
    assert sums.ess_frac == pytest.approx(32.49 / 17.29 / 4, rel=1e-12)
    assert ess_scale(WEIGHTS) == pytest.approx(0.68540515, rel=1e-8)
    assert ess_scale(WEIGHTS, rule="linear") == pytest.approx(0.46978022, rel=1e-8)


def test_the_ess_of_data_that_is_not_stale_is_the_measure_and_never_raises_the_rate() -> None:
    assert ess_scale(WEIGHTS, base_ess_frac=0.8) == pytest.approx((32.49 / 17.29 / 4 / 0.8) ** 0.5, rel=1e-12)
    assert ess_scale(WEIGHTS, base_ess_frac=0.4) == 1.0


def test_equal_weights_keep_the_rate_and_one_sequence_with_all_of_it_leaves_a_share() -> None:
    assert ess_scale(torch.full((7,), 0.03)) == pytest.approx(1.0, rel=1e-12)
    assert ess_scale(torch.tensor([0.0, 0.0, 5.0, 0.0]), rule="linear") == 0.25


@pytest.mark.parametrize("rule", ["sqrt", "linear"])
def test_a_batch_nothing_is_learnt_from_takes_no_step(rule: ess_control.Rule) -> None:
    """All weights 0, no sequences, all masked: AdamW's momentum would move the weights all the same."""
    assert ess_scale(torch.zeros(5), rule=rule) == 0.0
    assert ess_scale(torch.zeros(0), rule=rule) == 0.0
    assert ess_scale(torch.ones(3), mask=torch.zeros(3, dtype=torch.bool), rule=rule) == 0.0


def test_sequences_without_loss_tokens_are_not_there() -> None:
    mask = torch.tensor([True, False, True])
    assert EssSums.of(torch.tensor([1.0, float("nan"), 3.0]), mask=mask) == EssSums.of(torch.tensor([1.0, 3.0]))


def test_squares_of_large_float32_weights_do_not_overflow() -> None:
    assert ess_scale(torch.tensor([3e38, 1e38])) == pytest.approx(0.8**0.5, rel=1e-6)


def test_a_mean_of_the_ranks_sizes_is_not_the_size_of_all() -> None:
    """Each rank alone has equal weights; together one rank's drown the other's."""
    ranks = [EssSums.of(torch.full((2,), 1.0)), EssSums.of(torch.full((2,), 100.0))]
    assert [rank.ess_frac for rank in ranks] == pytest.approx([1.0, 1.0])
    assert (ranks[0] + ranks[1]).ess_frac == pytest.approx(202**2 / (2 + 20_000) / 4)


@given(shares, st.randoms())
def test_any_split_over_ranks_in_any_order_gives_the_same_scale(split: list[list[float]], random: object) -> None:
    whole = [weight for share in split for weight in share]
    random.shuffle(whole)
    added = EssSums(0.0, 0.0, 0)
    for share in split:
        added = added + EssSums.of(torch.tensor(share, dtype=torch.float64))
    scale = learning_rate_scale(added)
    assert added.count == len(whole)
    assert scale == pytest.approx(ess_scale(torch.tensor(whole, dtype=torch.float64)), rel=1e-9)
    assert 0.0 <= scale <= 1.0
    assert added.ess <= len(whole) * (1 + 1e-9)


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8), st.floats(1e-3, 1e3))
def test_a_factor_common_to_all_weights_does_not_matter(weights: list[float], factor: float) -> None:
    given_weights = torch.tensor(weights, dtype=torch.float64)
    assert ess_scale(given_weights * factor) == pytest.approx(ess_scale(given_weights), rel=1e-9)


def test_weights_carry_no_gradient() -> None:
    assert ess_scale(torch.tensor([1.0, 2.0], requires_grad=True)) == pytest.approx((9 / 5 / 2) ** 0.5)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(NonFiniteError, match=r"weights\[1\] = inf"):
        EssSums.of(torch.tensor([1.0, float("inf")]))
    for weights, mask in ((torch.ones(2, 2), None), (torch.ones(2), torch.ones(3, dtype=torch.bool)), (torch.ones(2), torch.ones(2))):
        with pytest.raises(ShapeError, match="weights and mask"):
            EssSums.of(weights, mask=mask)
    for base in (0.0, -1.0, 1.1, float("nan")):
        with pytest.raises(ConfigError, match="base_ess_frac"):
            ess_scale(WEIGHTS, base_ess_frac=base)
    with pytest.raises(ConfigError, match="sqrt or linear"):
        ess_scale(WEIGHTS, rule="root")


def test_the_example_runs() -> None:
    assert doctest.testmod(ess_control) == (0, 3)
