"""The error budget: a share of the newest rollouts, of the run and of each source."""

from __future__ import annotations

import pytest

from asyncrl.errors import ConfigError, RunAborted
from asyncrl.rollout.error_budget import WINDOW_ROLLOUTS, ErrorBudget
from asyncrl.types import Status

BAD, GOOD = Status.REWARD_ERROR, Status.STOP


def survived(budget: ErrorBudget, statuses: list[Status], *, source: str = "train") -> int:
    """How many rollouts end before the run does."""
    for number, status in enumerate(statuses):
        try:
            budget.ended(status, source=source, error=f"failure {number}")
        except RunAborted:
            return number
    return len(statuses)


@pytest.mark.parametrize(("max_frac", "allowed"), [(0.0, 0), (0.25, 16), (0.5, 32), (0.99, 63)])
def test_a_run_in_which_everything_fails_ends_with_the_first_failure_over_the_share(max_frac: float, allowed: int) -> None:
    assert survived(ErrorBudget(max_frac), [BAD] * 100) == allowed


def test_failures_that_alternate_with_successes_end_the_run_only_over_the_share() -> None:
    assert survived(ErrorBudget(0.5), [BAD, GOOD] * 500) == 1000
    assert survived(ErrorBudget(0.5), [BAD, GOOD, BAD] * 500) < WINDOW_ROLLOUTS


def test_old_failures_are_forgotten() -> None:
    budget = ErrorBudget(0.5)
    for _ in range(10):
        assert survived(budget, [BAD] * 32 + [GOOD] * WINDOW_ROLLOUTS) == 32 + WINDOW_ROLLOUTS


def test_a_source_that_always_fails_ends_the_run_though_the_others_work() -> None:
    budget = ErrorBudget(0.5)
    for _ in range(32):
        assert survived(budget, [GOOD] * 9, source="sums") == 9
        budget.ended(BAD, source="puzzles", error="")
    with pytest.raises(RunAborted, match=r"^33 of the last 33 rollouts of source 'puzzles' failed"):
        budget.ended(BAD, source="puzzles", error="")


def test_the_message_counts_every_kind_and_holds_the_newest_text() -> None:
    budget = ErrorBudget(2 / WINDOW_ROLLOUTS)
    budget.ended(GOOD, source="sums", error="")
    budget.ended(Status.REWARD_TIMEOUT, source="sums", error="ran longer than 10 s")
    budget.ended(BAD, source="sums", error="ZeroDivisionError: first")
    with pytest.raises(RunAborted) as raised:
        budget.ended(BAD, source="sums", error="ZeroDivisionError: second")
    assert str(raised.value) == (
        "3 of the last 4 rollouts failed, more than run.error_budget = 0.03125 of 64 allows. Failures of the whole run, 4 rollouts: "
        "2 reward_error, 1 reward_timeout. Mend the cause, or raise run.error_budget. The newest, reward_error: ZeroDivisionError: second")


@pytest.mark.parametrize("max_frac", [-0.1, 1.0, float("nan")])
def test_a_share_that_would_let_everything_fail_for_ever_is_refused(max_frac: float) -> None:
    with pytest.raises(ConfigError, match=r"run\.error_budget"):
        ErrorBudget(max_frac)
