import pytest
from numpy.testing import assert_allclose

from asyncrl.correction.overlong import overlong_penalty
from asyncrl.errors import ConfigError, NonFiniteError

LENGTHS = [0, 10_000, 16_384, 18_432, 20_480, 21_000]


def test_the_penalty_grows_over_the_cache_and_stops_at_minus_one() -> None:
    got = overlong_penalty(LENGTHS, max_tokens=20_480, cache_tokens=4096)
    assert_allclose(got, [0.0, 0.0, 0.0, -0.5, -1.0, -1.0], atol=1e-12)


def test_unclamped_it_goes_on_falling() -> None:
    got = overlong_penalty(LENGTHS, max_tokens=20_480, cache_tokens=4096, unclamped=True)
    assert_allclose(got, [0.0, 0.0, 0.0, -0.5, -1.0, -1.0 - 520 / 4096], atol=1e-12)


def test_the_cache_may_be_all_or_one_token() -> None:
    assert overlong_penalty([0, 1, 4, 5], max_tokens=4, cache_tokens=4).tolist() == [0.0, -0.25, -1.0, -1.0]
    assert overlong_penalty([3, 4], max_tokens=4, cache_tokens=1).tolist() == [0.0, -1.0]


@pytest.mark.parametrize(("max_tokens", "cache_tokens"), [(4, 0), (4, 5), (0, 0), (4, -1)])
def test_limits_that_cannot_be_are_refused(max_tokens: int, cache_tokens: int) -> None:
    with pytest.raises(ConfigError, match="1 ≤ cache_tokens ≤ max_tokens"):
        overlong_penalty([1], max_tokens=max_tokens, cache_tokens=cache_tokens)


def test_a_length_that_is_no_number_is_refused() -> None:
    with pytest.raises(NonFiniteError, match=r"lengths\[1\]"):
        overlong_penalty([1.0, float("nan")], max_tokens=4, cache_tokens=2)
