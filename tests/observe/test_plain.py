"""Plain lines: every value under its title, nothing wider than 80 columns, whatever the values are."""

from __future__ import annotations

import re

import pytest

from asyncrl.observe.board import Board
from asyncrl.observe.console import Console
from asyncrl.observe.health import WIDTH
from asyncrl.observe.plain import HEADER, PlainFace, step_line
from tests.observe.rows import SETTINGS, STRANGE, step_row, strange_rows


def shown(*rows, end: str | None = None) -> list[str]:
    """The lines of a console that is told these rows."""
    lines: list[str] = []
    console = Console(PlainFace(lines.append))
    console.start(SETTINGS, where="in runs/sums", with_table=False)
    for row in rows:
        console.row(row)
    if end is not None:
        console.end(end)
    assert (console.lost, console.error) == (0, "")
    return lines


def board(row) -> Board:
    made = Board(SETTINGS)
    made.add(row)
    return made


def test_every_value_stands_under_its_title():
    line = step_line(board(step_row(12)))
    assert [match.end() for match in re.finditer(r"\S+", line)] == [match.end() for match in re.finditer(r"\S+", HEADER)]
    assert line.split() == ["12", "0.438", "1.250", "2/2", "72", "0.012", "0.987", "3.1%", "100%", "12.3k", "23.5k", "2m12s"]


def test_what_is_outside_its_range_has_a_mark_behind_it():
    line = step_line(board(step_row(12, staleness__token__max=3.0, correction__ess__frac=0.3)))
    assert [word for word in line.split() if "!" in word] == ["3/2!", "0.300!"]
    assert len(line) == len(HEADER)


def test_what_was_not_measured_is_a_dash_and_what_is_not_finite_says_so():
    line = step_line(board({"step": 3, "reward/total/mean": None}))
    assert line.split() == ["3", "nan!", "-", "-/2", *["-"] * 8]


def test_no_line_is_wider_than_80_columns():
    lines = shown(*strange_rows(), end="x" * 300 + " " + "a long word and more " * 20)
    assert len(lines) > 100
    assert [line for line in lines if len(line) > WIDTH or "\n" in line] == []


@pytest.mark.parametrize("value", STRANGE.values(), ids=STRANGE)
def test_a_strange_value_leaves_every_other_in_its_place(value):
    line = step_line(board(step_row(12, reward__total__mean=value, rollout__tokens_per_s__last=value)))
    ordinary = step_line(board(step_row(12)))
    assert len(line) == len(ordinary)
    assert line[15:55] == ordinary[15:55]


def test_a_summary_after_ten_steps_has_what_the_lines_do_not_and_the_header_comes_again():
    lines = shown(*[step_row(step) for step in range(1, 12)])
    assert lines.count(HEADER) == 2
    text = "\n".join(lines[12:lines.index(HEADER, 3)])
    for wanted in ("-- step 10 of 100, 2m15s left --", "reward      0.438 ▁▁▁▁▁▁▁▁▁▁, sums 0.500", "words 0.250", "functions   right 0.400",
                   "1.2e-06 at equal weights (step 10), 0.0123 with staleness", "truncated 0.4%", "40 zero_variance groups so far",
                   "dead groups 12.5% (13.7% expected)", "depth 72 slots, 70 held", "engines 12.3k tok/s, trainer 23.5k tok/s",
                   "trainer waits 42.0% of the time for rollouts, engines 3.0%", "sync 0.0456 s, 32.1% changed", "loss -0.0001"):
        assert wanted in text


def test_a_single_source_is_not_shown_beside_the_whole():
    only = [{key: value for key, value in step_row(step).items() if key != "reward/source.words/mean"} for step in range(1, 11)]
    [line] = [line for line in shown(*only) if line.startswith("  reward  ")]
    assert line.split() == ["reward", "0.438", "▁" * 10]


def test_the_dead_groups_to_expect_are_told_where_the_mean_reward_is_a_pass_rate():
    graded = [step_row(step, reward__zero_or_one__frac=0.5) for step in range(1, 11)]
    assert "expected" not in "\n".join(shown(*graded))


def test_when_nobody_waits_it_says_so():
    rows = [step_row(step, trainer__wait_frac__last=0.01) for step in range(1, 11)]
    assert any("nobody for long: trainer 1.0%, engines 3.0% of the time" in line for line in shown(*rows))


def test_a_value_outside_its_range_is_warned_of_once_it_stays_there():
    low = [step_row(step, correction__ess__frac=0.3) for step in range(1, 7)]
    warnings = [line for line in shown(*low) if line.startswith("warning")]
    assert warnings == ["warning: step 3: ess is 0.3000, healthy >= 0.5: lower max_staleness or the"]
    once = [*low[:2], step_row(3), *low[3:5]]
    assert [line for line in shown(*once) if line.startswith("warning")] == []


def test_a_broken_promise_is_warned_of_at_once():
    lines = shown(step_row(1, staleness__token__max=3.0))
    assert any(line.startswith("warning: step 1: most stale is 3.0000, healthy <= 2") for line in lines)


def test_an_evaluation_is_compared_with_the_first():
    lines = shown({"eval_version": 0, "eval/sums/reward/mean": 0.25, "eval/sums/errors/sum": 0}, step_row(1),
                  {"eval_version": 25, "eval/sums/reward/mean": 0.5, "eval/sums/pass_at_4/mean": 0.75, "eval/sums/errors/sum": 2})
    assert lines[1].split(maxsplit=1) == ["held-out", "version 0, sums 0.250"]
    assert lines[-1].split(maxsplit=1) == ["held-out", "version 25, sums 0.500 from 0.250, pass@4 0.750, errors 2!"]


def test_a_set_without_a_reward_is_marked():
    assert shown({"eval_version": 0, "eval/sums/errors/sum": 8})[-1].split(maxsplit=1)[1].startswith("version 0, sums nan!, errors 8!")


def test_quiet_has_warnings_and_the_last_line():
    out: list[str] = []
    err: list[str] = []
    console = Console(PlainFace(lambda line: None, warn=err.append, last=out.append))
    console.start(SETTINGS, where="in runs/sums")
    console.note("an earlier run is kept")
    console.note("something is wrong", is_warning=True)
    for step in range(1, 25):
        console.row(step_row(step, train__nonfinite_steps__sum=float(step == 7)))
    console.end("reward 0.1 → 0.9")
    assert err == ["warning: something is wrong", "warning: step 7: not finite is 1.0000, healthy 0: lower the learning rate"]
    assert out == ["reward 0.1 → 0.9"]


def test_the_mismatch_of_the_newest_probe_stays_until_the_next():
    rows = [step_row(step) for step in range(1, 11)]
    for row in rows[1:]:
        del row["probe/gap/mean"]
    assert any("mismatch    1.2e-06 at equal weights (step 1), " in line for line in shown(*rows))
    rows[0]["probe/gap/mean"] = 0.015
    lines = shown(*rows)
    assert any("mismatch    0.0150 at equal weights (step 1)!, " in line for line in lines)
    assert sum(line.startswith("warning: step 1: mismatch is 0.0150, healthy <= 0.01") for line in lines) == 1
