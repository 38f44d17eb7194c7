"""The console on a terminal: a panel that is updated in place, what happens above it. rich is imported here alone."""

from __future__ import annotations

import time

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from asyncrl.observe.board import Board, Topic, title
from asyncrl.observe.figures import duration, printable, shorten
from asyncrl.observe.health import table
from asyncrl.observe.output import Output
from asyncrl.observe.plain import MARK

_LEAST_INTERVAL_S = 0.5
"""A panel is drawn no more often: drawing takes 8 ms of the controller's core, and steps may be faster than eyes."""
_WIDEST = 100
"""Columns; longer lines are hard to follow."""


class LiveFace:
    """Writes to a terminal. The panel appears with the first row and stays when the run ends."""

    def __init__(self, output: Output) -> None:
        self._console = Console(file=output, force_terminal=True, highlight=False)  # type: ignore[arg-type]
        self._live: Live | None = None
        self._is_over = False
        self._drawn_s = 0.0
        self._stepped_s: float | None = None
        """When the newest step was seen to be made; None for one that was made before."""

    def start(self, board: Board, *, where: str, with_table: bool) -> None:
        """The run has a folder and its settings."""
        self._console.print(Text(f"{board.settings.name}: {board.settings.steps} steps, {where}", style="bold"))
        if with_table:
            self._console.print(Text("\n".join(["", *table(board.settings), ""]), style="dim"))

    def note(self, text: str, *, is_warning: bool) -> None:
        """A sentence above the panel."""
        self._console.print(Text(printable(f"warning: {text}" if is_warning else text), style="yellow" if is_warning else ""))

    def stepped(self, board: Board) -> None:
        """The board has a new step."""
        self._stepped_s = time.monotonic()
        if self._stepped_s - self._drawn_s >= _LEAST_INTERVAL_S:
            self.tick(board)

    def evaluated(self, board: Board) -> None:
        """The board has a new evaluation."""
        self.tick(board)

    def caught_up(self, board: Board) -> None:
        """The board has taken in rows that are not new."""
        self._stepped_s = None
        self.tick(board)

    def tick(self, board: Board) -> None:
        """Draw the panel as things stand."""
        if self._is_over or not (board.step or board.evaluations):
            return
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
            self._live.start()
            self._console.show_cursor(True)  # a process that is killed could not give it back
        self._drawn_s = time.monotonic()
        self._live.update(self._panel(board), refresh=True)

    def end(self, board: Board | None, text: str) -> None:
        """The panel as it stays, and the last line under it."""
        self._stepped_s = None
        if board is not None:
            self.tick(board)
        self._is_over = True
        self.close()
        self._console.print(Text(printable(text), style="bold"))

    def close(self) -> None:
        """Leave the panel, and give the cursor back."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _panel(self, board: Board) -> Panel:
        settings = board.settings
        rows = Table.grid(padding=(0, 2), expand=True)
        rows.add_column(style="dim", no_wrap=True)
        rows.add_column(ratio=1)
        rows.add_row("step", ProgressBar(total=max(1, settings.steps), completed=min(board.step, settings.steps)))
        for topic in board.topics(board.latest):
            rows.add_row(topic.title, _words(topic))
        idle = "" if self._stepped_s is None else f", last step {duration(time.monotonic() - self._stepped_s)} ago"
        return Panel(rows, width=min(_WIDEST, self._console.width), title=Text(shorten(settings.name, 30), style="bold"),
                     subtitle=Text(f"{title(board)}{idle}"))


def _words(topic: Topic) -> Text:
    """The cells of a topic, those outside their healthy range in red and marked: colour is not for everyone."""
    cells = [Text(cell.text + MARK, style="bold red") if cell.is_marked else Text(cell.text) for cell in topic.cells]
    return Text(", ").join(cells)
