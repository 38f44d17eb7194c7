"""The panel on a terminal: at most 80 columns on a terminal of 80, whatever the values are, and the cursor is given back."""

from __future__ import annotations

import io
import os
import re

import pytest

from asyncrl.observe.console import Console
from asyncrl.observe.live import LiveFace
from asyncrl.observe.output import Output
from tests.observe.rows import SETTINGS, step_row, strange_rows

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch):
    """A terminal of 80 × 50 with colours."""
    for name, value in {"COLUMNS": "80", "LINES": "50", "TERM": "xterm-256color"}.items():
        monkeypatch.setenv(name, value)
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    return Terminal()


def told(terminal: Terminal, *rows, end: str = "the end") -> str:
    console = Console(LiveFace(Output(terminal)))
    console.start(SETTINGS, where="in runs/sums")
    for row in rows:
        console.row(row)
        console.tick()
    console.end(end)
    console.tick()
    console.close()
    assert (console.lost, console.error) == (0, "")
    return terminal.getvalue()


def lines_of(text: str) -> list[str]:
    return [line for line in re.split(r"[\r\n]", CONTROL.sub("", text)) if line]


def test_no_line_is_wider_than_a_terminal_of_80_columns(terminal):
    lines = lines_of(told(terminal, *strange_rows(), end="word " * 60))
    assert len(lines) > 500
    assert max(map(len, lines)) <= 80


def test_the_panel_has_every_quantity(terminal):
    held_out = {"eval_version": 0, "eval/sums/reward/mean": 0.25, "eval/sums/errors/sum": 0}
    console = Console(LiveFace(Output(terminal)))
    console.start(SETTINGS, where="in runs/sums")
    console.row(held_out)
    console.row(step_row(7))
    console.tick()
    panel = "\n".join(lines_of(terminal.getvalue()))
    panel = panel[panel.rindex("╭"):]
    console.close()
    for wanted in ("sums", "0.438", "words 0.250", "version 0, sums 0.250", "mean 1.250 steps", "max 2 of 2", "depth 72", "70 held",
                   "1.2e-06 at equal weights",
                   "0.0123 with staleness", "ess 0.987", "clip 3.1%", "kept 100%", "truncated 0.4%", "cut 2.0%", "errors 0",
                   "4 zero_variance",
                   "12.3k tok/s", "23.5k tok/s", "trainer waits 42.0% of the time for rollouts", "sync 0.0456 s", "32.1% changed",
                   "step 7 of 100, 2m20s left, last step 0s ago"):
        assert wanted in panel


def test_the_panel_stays_and_the_last_line_stands_under_it(terminal):
    text = told(terminal, step_row(1), step_row(2))
    assert lines_of(text)[-1] == "the end"
    assert lines_of(text)[-2].startswith("╰")
    assert re.search(re.escape(HIDE) + r"[\r\n]*" + re.escape(SHOW), text), "hidden for as long as the panel stands"


def test_what_is_outside_its_range_is_marked_without_colour_too(terminal, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    text = told(terminal, step_row(1, correction__ess__frac=0.2))
    assert "ess 0.200!" in text
    assert "\x1b[31m" not in text
    assert "\x1b[1;31m" not in text


def test_a_terminal_that_changes_its_size_is_followed(terminal, monkeypatch):
    columns = 80
    for name in ("COLUMNS", "LINES"):
        monkeypatch.delenv(name)
    monkeypatch.setattr("os.get_terminal_size", lambda descriptor: os.terminal_size((columns, 50)))
    console = Console(LiveFace(Output(terminal)))
    console.start(SETTINGS, where="in runs/sums", with_table=False)
    console.row(step_row(1))
    columns = 44
    begins = len(terminal.getvalue())
    console.tick()
    console.end("the end")
    assert max(map(len, lines_of(terminal.getvalue()[begins:]))) <= 44
    assert console.lost == 0


def test_a_terminal_without_unicode_gets_a_panel_of_ascii(terminal):
    terminal.encoding = "ascii"
    told(terminal, step_row(1), step_row(2)).encode("ascii")


def test_a_name_is_text_and_not_markup(terminal):
    text = told(terminal, {**step_row(1), "reward/source.[red]x[/red]/mean": 0.5, "reward/source.\x1b[2J/mean": 0.5})
    assert "[red]x[/red]" in text
    assert "\x1b[3J" not in told(Terminal(), end="a message with \x1b[3J in it")
    assert "\x1b[2J" not in text
