"""The numbers a run ends with, by hand."""

from __future__ import annotations

import pytest

from asyncrl.observe.summary import edge_rewards, largest_of, mean_of, reward_curve, total_of


def row(step: int, reward: float | None = None, scored: float = 1, **more: float) -> dict[str, float]:
    scores = {} if reward is None else {"reward/total/mean": reward, "reward/rollouts/sum": scored}
    return {"step": step, **scores, **more}


def test_the_edges_average_rollouts_not_steps():
    rows = [row(1, 0.0, 9), row(2, 1.0, 1), row(3), row(4), row(5), row(6, 1.0, 10), row(7, 0.5, 10)]
    first, last = edge_rewards(rows)
    assert first == pytest.approx(0.1)    # steps 1 to 5: 1 of 10 rollouts
    assert last == pytest.approx(0.75)    # steps 3 to 7: 15 of 20


def test_a_run_without_scores_has_no_edges():
    assert edge_rewards([row(1), row(2)]) == (None, None)
    assert edge_rewards([]) == (None, None)


def test_the_curve_leaves_out_steps_without_reward():
    assert reward_curve([row(1, 0.2), row(2), row(3, 0.4)]) == ([1, 3], [0.2, 0.4])


def test_statistics_are_over_the_steps_that_have_the_metric():
    rows = [row(1, x=1.0), row(2), row(3, x=4.0)]
    assert (mean_of(rows, "x"), largest_of(rows, "x"), total_of(rows, "x")) == (2.5, 4.0, 5.0)
    assert (mean_of(rows, "y"), largest_of(rows, "y"), total_of(rows, "y")) == (None, None, 0.0)
