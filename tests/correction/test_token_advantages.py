"""Token by token: GAE, returns to go, REINFORCE++. Environment tokens are as if they were not there."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from asyncrl.correction.token_advantages import GAE, at_the_end, gae, reinforce_plus_plus, returns_to_go
from asyncrl.correction.whitening import Moments, whiten
from asyncrl.errors import ConfigError, NonFiniteError, ShapeError

NAN, INF = float("nan"), float("inf")
REWARDS, VALUES = [0.0, 0.0, 0.0, 0.0, 0.0, 1.0], [0.2, 0.3, 9.0, -9.0, 0.5, 0.6]
MASK, BOUNDS = np.array([1, 1, 0, 0, 1, 1], bool), [0, 6]
seeds = st.integers(0, 2**32 - 1)


def drawn(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, float, float]:
    """Rewards, values, mask, offsets, gamma and lambda; sequences may be empty or wholly masked."""
    rng = np.random.default_rng(seed)
    bounds = np.concatenate([[0], rng.integers(0, 8, rng.integers(1, 6)).cumsum()])
    tokens = int(bounds[-1])
    return rng.normal(size=tokens), rng.normal(size=tokens), rng.random(tokens) > 0.4, bounds, rng.uniform(0.3, 1.0), rng.uniform(0.0, 1.0)


def plain(rewards: np.ndarray, values: np.ndarray, *, gamma: float, lam: float) -> np.ndarray:
    """The definition for one sequence: Σ (γλ)^k δ over what is left."""
    after = np.append(values, 0.0)
    deltas = [rewards[t] + gamma * after[t + 1] - values[t] for t in range(len(rewards))]
    return np.array([sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(rewards))) for t in range(len(rewards))])


def test_masked_tokens_are_transparent() -> None:
    """By hand, backwards: 1 − 0.6; 0.6 − 0.5 + 0.95 · 0.4; over the gap 0.5 − 0.3 + 0.95 · 0.48; 0.3 − 0.2 + 0.95 · 0.656."""
    got = gae(REWARDS, values=VALUES, loss_mask=MASK, cu_seqlens=BOUNDS)
    assert_allclose(got.advantages, [0.7232, 0.656, 0.0, 0.0, 0.48, 0.4], atol=1e-12)
    assert_allclose(got.returns, [0.9232, 0.956, 0.0, 0.0, 0.98, 1.0], atol=1e-12)
    assert_allclose(whiten(got.advantages, counts=MASK), [1.05398678, 0.606840872, 0.0, 0.0, -0.564255548, -1.0965721], atol=1e-8)


def test_as_steps_in_time_masked_tokens_leak_in() -> None:
    got = gae(REWARDS, values=VALUES, loss_mask=MASK, cu_seqlens=BOUNDS, skip_masked=False)
    assert_allclose(got.advantages, [0.6560255, 0.58529, -8.5418, 9.956, 0.48, 0.4], atol=1e-12)
    assert_allclose(got.returns, got.advantages + VALUES, atol=1e-12)


def test_lambda_one_is_returns_minus_values_and_lambda_zero_the_one_step_error() -> None:
    rewards, values, mask = [0.5, -1.0, 2.0], np.array([0.1, 0.2, 0.3]), np.ones(3, bool)
    monte_carlo = gae(rewards, values=values, loss_mask=mask, cu_seqlens=[0, 3], gamma=0.9, lam=1.0)
    assert_allclose(monte_carlo.returns, returns_to_go(rewards, loss_mask=mask, cu_seqlens=[0, 3], gamma=0.9), atol=1e-12)
    one_step = gae(rewards, values=values, loss_mask=mask, cu_seqlens=[0, 3], gamma=0.9, lam=0.0)
    assert_allclose(one_step.advantages, [0.5 + 0.18 - 0.1, -1.0 + 0.27 - 0.2, 2.0 - 0.3], atol=1e-12)


@given(seeds)
def test_gae_is_its_definition_on_the_loss_tokens_of_each_sequence(seed: int) -> None:
    rewards, values, mask, bounds, gamma, lam = drawn(seed)
    got = gae(rewards, values=values, loss_mask=mask, cu_seqlens=bounds, gamma=gamma, lam=lam)
    whole = gae(rewards, values=values, loss_mask=mask, cu_seqlens=bounds, gamma=gamma, lam=lam, skip_masked=False)
    wanted, steps = np.zeros(len(mask)), np.zeros(len(mask))
    for start, end in itertools.pairwise(bounds):
        own = np.arange(start, end)
        kept = own[mask[own]]
        wanted[kept] = plain(rewards[kept], values[kept], gamma=gamma, lam=lam)
        steps[own] = plain(rewards[own], values[own], gamma=gamma, lam=lam)
    assert_allclose(got.advantages, wanted, atol=1e-10)
    assert_allclose(got.returns, np.where(mask, wanted + values, 0.0), atol=1e-10)
    assert_allclose(whole.advantages, steps, atol=1e-10)


@given(seeds)
def test_returns_to_go_are_gae_of_a_critic_that_knows_nothing(seed: int) -> None:
    rewards, _, mask, bounds, gamma, _ = drawn(seed)
    got = returns_to_go(rewards, loss_mask=mask, cu_seqlens=bounds, gamma=gamma)
    blank = gae(rewards, values=np.zeros(len(mask)), loss_mask=mask, cu_seqlens=bounds, gamma=gamma, lam=1.0)
    assert_allclose(got, blank.advantages, atol=1e-12)


def both(rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, bounds: np.ndarray) -> list[list[float]]:
    estimated: GAE = gae(rewards, values=values, loss_mask=mask, cu_seqlens=bounds)
    return [estimated.advantages.tolist(), estimated.returns.tolist(),
            reinforce_plus_plus(rewards, loss_mask=mask, cu_seqlens=bounds, gamma=0.9).tolist()]


@given(seeds, st.sampled_from([NAN, INF, -INF, 1e30]))
def test_anything_may_stand_at_masked_tokens(seed: int, garbage: float) -> None:
    rewards, values, mask, bounds, _, _ = drawn(seed)
    dirty = [np.where(mask, numbers, garbage) for numbers in (rewards, values)]
    assert both(*dirty, mask, bounds) == both(rewards, values, mask, bounds)


@given(seeds)
def test_masked_tokens_may_as_well_be_cut_out(seed: int) -> None:
    rewards, values, mask, bounds, _, _ = drawn(seed)
    lengths = [int(mask[start:end].sum()) for start, end in itertools.pairwise(bounds)]
    short = both(rewards[mask], values[mask], np.ones(int(mask.sum()), bool), np.concatenate([[0], np.cumsum(lengths)]))
    assert [np.array(row)[mask].tolist() for row in both(rewards, values, mask, bounds)] == short


def test_reinforce_plus_plus_whitens_over_all_tokens_of_the_batch() -> None:
    """Returns 1, 1 and −1, −1, −1: mean −0.2, variance 1.2."""
    mask, bounds = np.array([1, 1, 0, 1, 1, 1], bool), [0, 3, 6]
    rewards = [0.0, 1.0, NAN, 0.0, 0.0, -1.0]
    assert_allclose(returns_to_go(rewards, loss_mask=mask, cu_seqlens=bounds), [1.0, 1.0, 0.0, -1.0, -1.0, -1.0], atol=1e-12)
    assert_allclose(reinforce_plus_plus(rewards, loss_mask=mask, cu_seqlens=bounds),
                    [1.09544511, 1.09544511, 0.0, -0.73029674, -0.73029674, -0.73029674], atol=1e-8)


def test_discounting_counts_loss_tokens_alone() -> None:
    got = returns_to_go([0.0, 5.0, 0.0, 8.0], loss_mask=np.array([1, 0, 1, 1], bool), cu_seqlens=[0, 4], gamma=0.5)
    assert got.tolist() == [2.0, 0.0, 4.0, 8.0]


def test_a_batch_of_equal_returns_gets_exactly_zero() -> None:
    rewards = at_the_end(np.full(3, 0.7, np.float32), loss_mask=np.ones(6, bool), cu_seqlens=[0, 1, 3, 6])
    assert reinforce_plus_plus(rewards, loss_mask=np.ones(6, bool), cu_seqlens=[0, 1, 3, 6]).tolist() == [0.0] * 6
    assert reinforce_plus_plus([9.0], loss_mask=np.ones(1, bool), cu_seqlens=[0, 1]).tolist() == [0.0]


def test_ranks_with_a_share_each_whiten_by_the_moments_of_all() -> None:
    rewards, mask, bounds = np.arange(6.0) % 4, np.array([1, 1, 0, 1, 1, 1], bool), np.array([0, 3, 6])
    whole = reinforce_plus_plus(rewards, loss_mask=mask, cu_seqlens=bounds)
    shares = [(slice(0, 3), [0, 3]), (slice(3, 6), [0, 3])]
    returns = [returns_to_go(rewards[part], loss_mask=mask[part], cu_seqlens=cu) for part, cu in shares]
    moments = sum((Moments.of(own, counts=mask[part]) for own, (part, _) in zip(returns, shares, strict=True)),
                  Moments.of([], counts=[]))
    apart = [whiten(own, counts=mask[part], moments=moments) for own, (part, _) in zip(returns, shares, strict=True)]
    assert_allclose(np.concatenate(apart), whole, rtol=1e-12)


def test_an_outcome_reward_stands_at_the_last_loss_token() -> None:
    mask = np.array([0, 1, 1, 0, 0, 0, 1], bool)
    got = at_the_end([2.0, 3.0, 4.0, 5.0], loss_mask=mask, cu_seqlens=[0, 4, 5, 5, 7])
    assert got.tolist() == [0.0, 0.0, 2.0, 0.0, 0.0, 0.0, 5.0]


def test_no_tokens_and_no_sequences_are_no_error() -> None:
    none = np.zeros(0)
    assert both(none, none, np.zeros(0, bool), np.array([0])) == [[], [], []]
    assert gae([NAN], values=[NAN], loss_mask=np.zeros(1, bool), cu_seqlens=[0, 1]).returns.tolist() == [0.0]


@pytest.mark.parametrize("name", ["rewards", "values"])
def test_a_non_finite_number_at_a_loss_token_is_named_with_its_sequence(name: str) -> None:
    numbers = {"rewards": [0.0] * 4, "values": [0.0] * 4}
    numbers[name] = [0.0, 0.0, 0.0, NAN]
    with pytest.raises(NonFiniteError, match=rf"{name}\[3\] = nan in sequence 1"):
        gae(numbers["rewards"], values=numbers["values"], loss_mask=np.array([1, 1, 0, 1], bool), cu_seqlens=[0, 2, 4])


def test_as_steps_in_time_masked_tokens_must_be_finite() -> None:
    with pytest.raises(NonFiniteError, match=r"values\[0\]"):
        gae([0.0, 0.0], values=[NAN, 0.0], loss_mask=np.array([False, True]), cu_seqlens=[0, 2], skip_masked=False)


@pytest.mark.parametrize(("broken", "said"), [
    (lambda: returns_to_go([0.0], loss_mask=[1], cu_seqlens=[0, 1]), "bool"),
    (lambda: returns_to_go([0.0], loss_mask=[True], cu_seqlens=[]), "cu_seqlens"),
    (lambda: returns_to_go([0.0], loss_mask=[True], cu_seqlens=[0, 2]), "rise from 0 to 1"),
    (lambda: returns_to_go([0.0, 0.0], loss_mask=[True, True], cu_seqlens=[0, 2, 1, 2]), "rise from 0 to 2"),
    (lambda: returns_to_go([0.0, 0.0], loss_mask=[True], cu_seqlens=[0, 1]), r"rewards must be \[1\]"),
    (lambda: at_the_end([0.0, 0.0], loss_mask=[True], cu_seqlens=[0, 1]), r"rewards must be \[N\]")])
def test_arrays_that_contradict_one_another_are_refused(broken: Callable[[], object], said: str) -> None:
    with pytest.raises(ShapeError, match=said):
        broken()


@pytest.mark.parametrize(("settings", "field"), [({"gamma": 0.0}, "gamma"), ({"gamma": 1.01}, "gamma"), ({"gamma": NAN}, "gamma"),
                                                 ({"lam": -0.1}, "lam"), ({"lam": 1.1}, "lam")])
def test_discounts_outside_their_range_are_refused(settings: dict[str, float], field: str) -> None:
    with pytest.raises(ConfigError, match=field) as caught:
        gae([0.0], values=[0.0], loss_mask=[True], cu_seqlens=[0, 1], **settings)
    assert caught.value.field == field
