"""Whatever the terminal does, the run goes on: what a face raises is counted, what it blocks is left out."""

from __future__ import annotations

import io
import os
import threading

import pytest

from asyncrl.observe.console import Console, open_console
from asyncrl.observe.live import LiveFace
from asyncrl.observe.output import Output
from asyncrl.observe.plain import PlainFace
from tests.observe.rows import SETTINGS, step_row

BOUND_S = 20.0


class Broken(PlainFace):
    """Shows the start, then raises."""

    def __init__(self) -> None:
        super().__init__(lambda line: None)
        self.closed = 0

    def stepped(self, board):
        raise ZeroDivisionError("a face")

    def close(self):
        self.closed += 1
        raise OSError("and not even this")


class Blocked(PlainFace):
    """A terminal that takes nothing until it is released."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__(lines.append)
        self.reached, self.released = threading.Event(), threading.Event()

    def stepped(self, board):
        self.reached.set()
        assert self.released.wait(BOUND_S)
        super().stepped(board)


class Terminal(io.StringIO):
    """What a person looks at."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_a_face_that_raises_gives_way_to_the_next_and_is_counted():
    lines: list[str] = []
    broken = Broken()
    console = Console(broken, PlainFace(lines.append))
    console.start(SETTINGS, where="here")
    for step in (1, 2, 3):
        console.row(step_row(step))
    assert [line.split()[0] for line in lines[1:]] == ["2", "3"]
    assert (console.lost, broken.closed) == (2, 1)
    assert console.error == "OSError: and not even this"


def test_the_last_face_goes_on_after_it_raised():
    out = io.StringIO()
    console = open_console(stdout=out, stderr=io.StringIO())
    console.start(SETTINGS, where="here")
    out.close()
    console.row(step_row(1))
    console.row(step_row(2))
    console.end("done")
    console.close()
    assert console.lost == 3
    assert console.error.startswith("ValueError")


def test_a_terminal_that_blocks_costs_lines_and_no_time():
    lines: list[str] = []
    face = Blocked(lines)
    console = Console(face, capacity=2)
    console.start(SETTINGS, where="here", with_table=False)
    console.detach()
    console.row(step_row(1))
    assert face.reached.wait(BOUND_S)
    for step in range(2, 8):
        console.row(step_row(step))
    assert console.lost == 4
    assert console.error == "2 steps wait for the terminal"
    face.released.set()
    console.close(BOUND_S)
    assert [line.split()[0] for line in lines[2:]] == ["1", "2", "3"]


def test_a_terminal_that_never_takes_anything_does_not_keep_the_run_from_ending():
    face = Blocked([])
    console = Console(face)
    console.start(SETTINGS, where="here", with_table=False)
    console.detach()
    console.row(step_row(1))
    assert face.reached.wait(BOUND_S)
    console.row(step_row(2))
    console.close(timeout_s=0.01)
    assert console.lost >= 1
    assert console.error == "the terminal does not take what is written"
    face.released.set()
    console.close(BOUND_S)


def test_a_detached_console_shows_everything_in_order_before_it_closes():
    lines: list[str] = []
    console = Console(PlainFace(lines.append))
    console.start(SETTINGS, where="here", with_table=False)
    console.detach()
    for step in range(1, 10):
        console.row(step_row(step))
    console.end("the end")
    console.close(BOUND_S)
    assert [line.split()[0] for line in lines[1:11]] == ["step", *map(str, range(1, 10))]
    assert lines[-1] == "the end"
    assert console.lost == 0


def test_a_reader_that_goes_away_is_no_error_of_the_run():
    reading, writing = os.pipe()
    with open(writing, "w", encoding="utf-8") as out:
        console = open_console(stdout=out, stderr=io.StringIO())
        os.close(reading)
        console.start(SETTINGS, where="here")
        console.row(step_row(1))
        console.close()
    assert console.error.startswith("BrokenPipeError")


@pytest.mark.parametrize(("term", "terminal", "live"), [("xterm-256color", True, True), ("dumb", True, False), ("xterm", False, False),
                                                        (None, True, False)])
def test_the_panel_is_for_terminals_that_can_move_the_cursor(term, terminal, live, monkeypatch):
    monkeypatch.delenv("TERM", raising=False)
    if term:
        monkeypatch.setenv("TERM", term)
    console = open_console(stdout=Terminal() if terminal else io.StringIO(), stderr=io.StringIO())
    assert isinstance(console._faces[0], LiveFace) is live
    console.close()


def test_quiet_wins_over_the_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    out, err = Terminal(), io.StringIO()
    console = open_console(quiet=True, stdout=out, stderr=err)
    console.start(SETTINGS, where="here")
    console.row(step_row(1, train__nonfinite_steps__sum=1.0))
    console.end("the end")
    console.close()
    assert out.getvalue() == "the end\n"
    assert err.getvalue().startswith("warning: step 1: not finite is 1")


def test_a_terminal_without_unicode_is_written_to_in_ascii(monkeypatch):
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    console = open_console(stdout=out, stderr=io.StringIO())
    console.start(SETTINGS, where="in runs/größe")
    for step in range(1, 11):
        console.row(step_row(step))
    console.end("0.1 → 0.9")
    console.close()
    text = raw.getvalue().decode("ascii")
    assert (console.lost, "0.1 > 0.9" in text, "gr??e" in text) == (0, True, True)


def test_a_console_without_any_output_goes_on():
    console = Console(PlainFace(Output(None).line))
    console.start(SETTINGS, where="here")
    console.row(step_row(1))
    assert (console.lost, Output(None).isatty()) == (0, False)


def test_rows_of_before_a_resume_count_and_are_not_shown_again():
    lines: list[str] = []
    console = Console(PlainFace(lines.append))
    console.start(SETTINGS, where="here", with_table=False)
    console.catch_up([step_row(step, correction__ess__frac=0.1) for step in range(1, 8)])
    console.row(step_row(8))
    steps = [line.split()[0] for line in lines if line.startswith(" " * 5) and line.split()[0].isdigit()]
    assert (steps, any(line.startswith("warning") for line in lines)) == (["8"], False)
    assert any("▁▁▁▁▁▁▁," in line for line in lines)
