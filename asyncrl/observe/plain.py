"""The console where nobody watches: lines of at most 80 columns, for a log file or the output of a CI job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from asyncrl.observe.board import WINDOW_STEPS, Board, Topic, title
from asyncrl.observe.figures import count, duration, number, percent, wrapped
from asyncrl.observe.health import WIDTH, table

Write = Callable[[str], None]
_INDENT = 14
MARK = "!"
"""Behind what is outside its healthy range."""


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    metric: str
    width: int
    form: Callable[[float | None], str]


def _fixed(width: int) -> Callable[[float | None], str]:
    return lambda value: number(value, width=width)


_COLUMNS = (
    _Column("reward", "reward/total/mean", 6, _fixed(6)),
    _Column("stale", "staleness/token/mean", 5, _fixed(5)),
    _Column("max/K", "staleness/token/max", 5, count),
    _Column("depth", "buffer/depth/last", 5, count),
    _Column("gap", "correction/logprob_gap/mean", 7, _fixed(7)),
    _Column("ess", "correction/ess/frac", 5, _fixed(5)),
    _Column("clip", "correction/clipped/frac", 5, percent),
    _Column("kept", "correction/kept/frac", 5, percent),
    _Column("gen/s", "rollout/tokens_per_s/last", 5, count),
    _Column("train/s", "train/tokens_per_s/last", 7, count),
)
_STEP, _ETA = 6, 6
HEADER = " ".join(["step".rjust(_STEP), *(column.title.rjust(column.width) for column in _COLUMNS), "left".rjust(_ETA)])


def step_line(board: Board) -> str:
    """The newest step under `HEADER`. What was not measured is a dash, what is outside its healthy range has a mark behind it."""
    cells = [count(board.step, width=_STEP).rjust(_STEP) + " "]
    for column in _COLUMNS:
        text = column.form(board.latest.get(column.metric))
        if column.title == "max/K" and len(both := f"{text}/{board.settings.max_staleness}") <= column.width:
            text = both
        cells.append(text.rjust(column.width) + (MARK if board.is_marked(board.latest, column.metric) else " "))
    return "".join([*cells, duration(board.eta_s).rjust(_ETA)])


def topic_lines(topic: Topic, *, width: int = WIDTH) -> list[str]:
    """A topic in as many lines as it takes."""
    text = ", ".join(cell.text + MARK * cell.is_marked for cell in topic.cells)
    lines = wrapped(text, width - _INDENT)
    return [f"  {topic.title:{_INDENT - 2}}{lines[0]}", *(" " * _INDENT + line for line in lines[1:])]


def _sentence(text: str) -> list[str]:
    return wrapped(text, WIDTH, indent="  ")


class PlainFace:
    """A line a step, a summary every `WINDOW_STEPS` steps, the header again after each.

    Warnings and the last line may go elsewhere: a quiet console has nothing but those.
    """

    def __init__(self, write: Write, *, warn: Write | None = None, last: Write | None = None) -> None:
        self._write, self._warn, self._last = write, warn or write, last or write
        self._since_summary = 0

    def start(self, board: Board, *, where: str, with_table: bool) -> None:
        """The run has a folder and its settings."""
        _each(self._write, _sentence(f"run {board.settings.name}: {board.settings.steps} steps, {where}"))
        if with_table:
            _each(self._write, ["", *table(board.settings), ""])

    def note(self, text: str, *, is_warning: bool) -> None:
        """A sentence about something that happened."""
        _each(self._warn if is_warning else self._write, _sentence(f"warning: {text}" if is_warning else text))

    def stepped(self, board: Board) -> None:
        """The board has a new step."""
        if self._since_summary == 0:
            self._write(HEADER)
        self._write(step_line(board))
        self._since_summary += 1
        if self._since_summary == WINDOW_STEPS:
            self._summary(board)

    def evaluated(self, board: Board) -> None:
        """The board has a new evaluation."""
        _each(self._write, topic_lines(Topic("held-out", board.held_out())))

    def caught_up(self, board: Board) -> None:
        """The board has taken in rows that are not new."""
        self._summary(board)

    def tick(self, board: Board) -> None:
        """Time passes."""

    def end(self, board: Board | None, text: str) -> None:
        """The last line."""
        if board is not None and self._since_summary:
            self._summary(board)
        _each(self._last, _sentence(text))

    def close(self) -> None:
        """Nothing follows."""

    def _summary(self, board: Board) -> None:
        """The newest steps in words; the step lines above have the rest."""
        self._since_summary = 0
        self._write(f"-- {title(board)} ".ljust(WIDTH, "-"))
        for topic in board.topics(board.window()):
            if not topic.in_step_line:
                _each(self._write, topic_lines(topic))


def _each(write: Write, lines: list[str]) -> None:
    for line in lines:
        write(line)
