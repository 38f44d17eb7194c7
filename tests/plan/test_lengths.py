import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import ConfigError
from asyncrl.plan.lengths import Histogram, Lengths, Lognormal, MeanMax, cv2, mean_in_flight_tokens


def test_the_mean_after_the_cut_is_the_mean_asked_for() -> None:
    lengths = Lognormal(8192, 32768, sigma=0.8)
    drawn = lengths.sample(np.random.default_rng(0), groups=4000, group_size=50)
    assert drawn.mean() == pytest.approx(8192, rel=0.02)
    assert np.square(drawn.astype(float)).mean() == pytest.approx(lengths.mean_square, rel=0.03)
    assert drawn.max() == 32768
    assert cv2(lengths) == pytest.approx(0.67, abs=0.005)


@given(mean=st.floats(10, 900), sigma=st.floats(0.05, 1.5))
def test_any_mean_below_the_cut_is_met(mean: float, sigma: float) -> None:
    lengths = Lognormal(mean, 1000, sigma=sigma)
    points = lengths.quantiles(4000)
    assert points.mean() == pytest.approx(mean, rel=5e-3)
    assert np.square(points).mean() == pytest.approx(lengths.mean_square, rel=5e-2)
    assert np.all(np.diff(points) >= 0)


def test_rollouts_of_a_group_resemble_one_another_as_asked() -> None:
    drawn = Lognormal(1000, 10**6, sigma=0.5).sample(np.random.default_rng(1), groups=20_000, group_size=2, correlation=0.5)
    assert np.corrcoef(np.log(drawn[:, 0]), np.log(drawn[:, 1]))[0, 1] == pytest.approx(0.5, abs=0.02)


def test_a_histogram_gives_back_what_it_was_made_of() -> None:
    seen = [3, 5, 5, 9, 9, 9]
    lengths = Histogram.of(seen)
    assert (lengths.mean_tokens, lengths.mean_square, lengths.max_tokens) == (np.mean(seen), np.mean(np.square(seen)), 9)
    drawn = lengths.sample(np.random.default_rng(2), groups=30_000, group_size=2)
    assert np.unique(drawn).tolist() == [3, 5, 9]
    assert drawn.mean() == pytest.approx(np.mean(seen), rel=0.01)
    assert lengths.quantiles(6).tolist() == sorted(seen)


def test_tokens_in_flight_are_length_biased() -> None:
    seen = [10, 100]
    steps = [step for length in seen for step in range(length)]  # each answer, at each of its steps
    assert mean_in_flight_tokens(Histogram.of(seen)) == pytest.approx(np.mean(steps) + 0.5, rel=1e-9)
    assert mean_in_flight_tokens(MeanMax(100, 400)) == 50


def test_the_reference_is_a_mean_and_one_longest_answer() -> None:
    drawn = MeanMax(10, 40).sample(np.random.default_rng(0), groups=2, group_size=3)
    assert drawn.tolist() == [[10, 10, 10], [10, 10, 40]]
    assert [lengths.is_reference for lengths in (MeanMax(1, 2), Lognormal(1, 2), Histogram.of([1]))] == [True, False, False]


@pytest.mark.parametrize(("make", "message"), [
    (lambda: MeanMax(math.nan, 10), "mean_tokens"), (lambda: MeanMax(11, 10), "mean_tokens"), (lambda: MeanMax(1, 0), "max_tokens"),
    (lambda: Lognormal(10, 10), "mean_tokens"), (lambda: Lognormal(5, 10, sigma=0), "sigma"),
    (lambda: Histogram((), ()), "lengths"), (lambda: Histogram((2, 1), (1, 1)), "lengths"), (lambda: Histogram((1,), (0,)), "counts"),
    (lambda: Histogram.of([]), "lengths")])
def test_lengths_that_cannot_be_are_refused(make, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("lengths", [MeanMax(8, 20), Lognormal(8, 20), Histogram.of([1, 4, 20])])
def test_every_form_draws_whole_tokens_within_its_bounds(lengths: Lengths) -> None:
    drawn = lengths.sample(np.random.default_rng(3), groups=50, group_size=4, correlation=1.0)
    assert (drawn.shape, drawn.dtype) == ((50, 4), np.dtype(np.int64))
    assert drawn.min() >= 1
    assert drawn.max() <= 20
