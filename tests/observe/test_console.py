"""One line a step: every number under its title, nothing wider than a terminal."""

from __future__ import annotations

import re

from asyncrl.observe.console import HEADER, step_line

METRICS = {"reward/total/mean": 0.4375, "staleness/token/mean": 1.25, "staleness/token/max": 2.0, "buffer/depth/last": 72.0,
           "correction/ess/frac": 0.987, "correction/kept/frac": 1.0, "correction/logprob_gap/mean": 0.0123,
           "rollout/tokens_per_s/last": 12345.0, "train/tokens_per_s/last": 23456.0, "trainer/wait_frac/last": 0.25,
           "engine/wait_frac/last": 0.1, "weights/sync_s/mean": 0.0456, "weights/density/mean": 0.321, "train/period_s/last": 1.5}


def test_every_number_stands_under_its_title():
    titles, line = [match.end() for match in re.finditer(r"\S+( \S+)*", HEADER)], step_line(12, METRICS, max_staleness=2)
    assert [match.end() for match in re.finditer(r"\S+", line)] == titles
    assert line.split() == ["12", "0.438", "1.25", "2/2", "72", "0.987", "1.000", "1.2e-02", "12345", "10%",
                            "23456", "25%", "0.046", "32.1%", "1.50"]


def test_a_line_fits_a_terminal_of_120_columns():
    assert len(HEADER) <= 120
    assert len(step_line(99999, METRICS, max_staleness=99)) <= 120


def test_what_was_not_measured_is_a_dash():
    line = step_line(3, {"reward/total/mean": 1.0}, max_staleness=2)
    assert len(line) == len(HEADER)
    assert line.split() == ["3", "1.000", "-", "-/2", *["-"] * 11]
