"""The numbers a run ends with, by hand."""

from __future__ import annotations

import pytest

from asyncrl.observe.summary import edge_rewards, largest_of, last_line, mean_of, reward_curve, total_of


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


def test_the_last_line_leaves_out_what_was_not_measured_and_all_but_the_first_line_of_why_it_ended():
    summary = {"reward_first": 0.25, "reward_last": 0.5, "eval_before": None, "eval_after": None, "steps": 3, "wall_s": 4.2}
    assert last_line(summary, place="runs/a") == "reward 0.250 → 0.500, 3 steps in 4 s; see runs/a"
    assert last_line({"steps": 0, "wall_s": 0.0, "ended_early": "RunAborted: no\nTraceback\n"}, place="runs/a") == (
        "0 steps in 0 s; see runs/a; ended early: RunAborted: no")
    assert last_line(summary | {"eval_before": 0.1}, place="b").startswith("reward 0.250 → 0.500, held-out 0.100 → not measured, 3 steps")


def test_statistics_are_over_the_steps_that_have_the_metric():
    rows = [row(1, x=1.0), row(2), row(3, x=4.0)]
    assert (mean_of(rows, "x"), largest_of(rows, "x"), total_of(rows, "x")) == (2.5, 4.0, 5.0)
    assert (mean_of(rows, "y"), largest_of(rows, "y"), total_of(rows, "y")) == (None, None, 0.0)
