"""What an evaluation measures: means over prompts, pass@k without bias, failures counted apart, versions stamped."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from asyncrl.errors import RunAborted
from asyncrl.rollout.eval_set import EvalSet
from asyncrl.rollout.evaluation import Evaluation, SetResult, pass_at_k, summarise
from asyncrl.types import Prompt, Rollout, Sequence, SequenceBuilder, Status


def sequence(version: int, tokens: int) -> Sequence:
    builder = SequenceBuilder([1])
    builder.sampled(np.full(tokens, 2, np.int32), logprobs=np.full(tokens, -0.5, np.float32), policy_version=version, kv_fresh=True, turn=0)
    return builder.build()


def rollout(reward: float | None, *, version: int = 4, tokens: int = 1, status: Status = Status.STOP) -> Rollout:
    """A scored rollout, or a failed one."""
    status, rewards = (status, {"total": reward}) if reward is not None else (Status.REWARD_ERROR, {})
    error = "" if reward is not None else "RewardError: no judge\n  a line of it"
    return Rollout("p", -1, 0, (sequence(version, tokens),), status, rewards, error=error)


def result_of(*rewards: float | None, size: int = 1, **settings: object) -> SetResult:
    """The result of one set in which every prompt got `size` rollouts with these rewards."""
    asked = EvalSet("sums", tuple(Prompt(text="1+1=") for _ in range(len(rewards) // size)), samples_per_prompt=size, **settings)
    return summarise(asked, [rollout(reward) for reward in rewards])


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_sample(n: int) -> None:
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        right = [index < c for index in range(n)]
        subsets = [any(chosen) for chosen in itertools.combinations(right, k)]
        assert pass_at_k(n, c, k) == float(Fraction(sum(subsets), len(subsets)))


def test_pass_at_k_is_unbiased() -> None:
    """Over every outcome of n samples with success probability p, its expectation is 1 − (1−p)^k; that of 1 − (1−c/n)^k is not."""
    n, k, p = 6, 3, 0.3
    weights = [math.comb(n, c) * p ** c * (1 - p) ** (n - c) for c in range(n + 1)]
    assert np.dot(weights, [pass_at_k(n, c, k) for c in range(n + 1)]) == pytest.approx(1 - (1 - p) ** k, abs=1e-12)
    assert np.dot(weights, [1 - (1 - c / n) ** k for c in range(n + 1)]) != pytest.approx(1 - (1 - p) ** k, abs=1e-2)


def test_pass_at_k_keeps_every_digit_where_the_plain_difference_has_none() -> None:
    n, c, k = 10 ** 6, 1, 1
    assert pass_at_k(n, c, k) == 1e-6
    assert pass_at_k(10_000, 1, 100) == float(Fraction(100, 10_000))
    assert (pass_at_k(5, 0, 5), pass_at_k(5, 1, 5)) == (0.0, 1.0)


def test_every_prompt_weighs_the_same_and_failures_are_in_no_mean() -> None:
    result = result_of(1.0, 0.0, 1.0, None, None, None, size=2)
    assert result.reward == 0.75
    assert result.metrics["reward/stderr"] == pytest.approx(np.std([0.5, 1.0], ddof=1) / math.sqrt(2))
    assert (result.num_rollouts, result.num_errors) == (6, 3)
    assert (result.metrics["errors/sum"], result.metrics["error.reward_error/sum"]) == (3.0, 3.0)


def test_prompts_with_fewer_than_k_valid_samples_are_left_out_of_pass_at_k_and_counted() -> None:
    rewards = [1.0, 0.0, 0.0, 1.0, None, None, 0.0, 0.0, 0.0]
    metrics = result_of(*rewards, size=3, pass_at=(1, 2)).metrics
    assert metrics["pass_at_1/mean"] == pytest.approx((1 / 3 + 1 + 0) / 3)
    assert metrics["pass_at_1/left_out/sum"] == 0.0
    assert metrics["pass_at_2/mean"] == pytest.approx((2 / 3 + 0) / 2)
    assert metrics["pass_at_2/left_out/sum"] == 1.0


def test_a_sum_of_rewards_that_rounds_below_success_is_success() -> None:
    tenths = 0.7 + 0.2 + 0.1
    assert tenths < 1.0
    assert result_of(tenths, pass_at=(1,)).metrics["pass_at_1/mean"] == 1.0
    assert result_of(0.5, 0.4, pass_at=(1,), success_reward=0.5).metrics["pass_at_1/mean"] == 0.5


def test_lengths_and_truncations_are_means_over_what_was_scored() -> None:
    asked = EvalSet("sums", (Prompt(text="a"), Prompt(text="b")))
    metrics = summarise(asked, [rollout(1.0, tokens=3), rollout(0.0, tokens=8, status=Status.LENGTH)]).metrics
    assert (metrics["completion_tokens/mean"], metrics["truncated_frac/mean"]) == (5.5, 0.5)


def test_one_prompt_has_no_standard_error() -> None:
    assert "reward/stderr" not in result_of(1.0, 0.0, size=2).metrics


def test_a_set_in_which_everything_failed_has_no_mean_and_says_why() -> None:
    evaluation = Evaluation({"sums": result_of(None, None, pass_at=(1,))}, version=3)
    assert evaluation["sums"].reward is None
    assert not {name for name in evaluation.metrics if name.endswith(("/mean", "/stderr"))}
    assert evaluation.metrics["eval/sums/pass_at_1/left_out/sum"] == 2.0
    with pytest.raises(RunAborted, match=r"eval\.sets\.sums: each of its 2 rollouts failed, the last with RewardError: no judge"):
        evaluation.require_scored()


def test_the_stamp_spans_the_versions_that_wrote_a_token() -> None:
    asked = EvalSet("sums", (Prompt(text="a"), Prompt(text="b")))
    straddling = Evaluation({"a": summarise(asked, [rollout(1.0, version=2), rollout(0.0, version=3)]), "b": result_of(1.0)}, version=2)
    assert (straddling.version_min, straddling.version_max) == (2, 4)
    assert (straddling.metrics["eval/version/min"], straddling.metrics["eval/version/max"]) == (2.0, 4.0)
    unwritten = Evaluation({"a": SetResult({}, 1, 1, frozenset())}, version=7)
    assert (unwritten.version_min, unwritten.version_max) == (7, 7)
