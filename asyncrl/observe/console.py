"""The console of a run: what happens, told to a face. A face that raises or blocks costs what it did not show, never the run."""

from __future__ import annotations

import functools
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TextIO

from asyncrl.observe.board import Board
from asyncrl.observe.health import RunSettings
from asyncrl.observe.output import Output
from asyncrl.observe.plain import PlainFace

_TICK_S = 1.0
_CAPACITY = 1000
"""Steps a blocked terminal may lag behind before they are not shown."""


class Face(Protocol):
    """How it is shown. The board has taken in what a call is about."""

    def start(self, board: Board, *, where: str, with_table: bool) -> None:
        """The run has a folder and its settings."""

    def note(self, text: str, *, is_warning: bool) -> None:
        """A sentence about something that happened."""

    def stepped(self, board: Board) -> None:
        """The board has a new step."""

    def evaluated(self, board: Board) -> None:
        """The board has a new evaluation."""

    def caught_up(self, board: Board) -> None:
        """The board has taken in rows that are not new."""

    def tick(self, board: Board) -> None:
        """Time passes."""

    def end(self, board: Board | None, text: str) -> None:
        """The last line."""

    def close(self) -> None:
        """Nothing follows; safe to call twice."""


class Console:
    """Tells faces what happens. No call raises; after `detach` none waits for the terminal either, until `end` and `close`.

    Where the first face fails the next one goes on; `lost` counts the calls that were not shown, `error` is the newest reason.
    """

    def __init__(self, face: Face, *others: Face, capacity: int = _CAPACITY, close: Callable[[], None] = lambda: None) -> None:
        self.lost = 0
        self.error = ""
        self._faces = [face, *others]
        self._board: Board | None = None
        self._acts: queue.Queue[Callable[[], None] | None] = queue.Queue(maxsize=capacity)
        self._thread: threading.Thread | None = None
        self._close = close

    def start(self, settings: RunSettings, *, where: str, with_table: bool = True) -> None:
        """A run with these settings, and what healthy values look like; what was known of another is forgotten."""
        self._do(functools.partial(self._start, settings, where=where, with_table=with_table))

    def note(self, text: str, *, is_warning: bool = False) -> None:
        """Something happened."""
        self._do(lambda: self._faces[0].note(text, is_warning=is_warning))

    def row(self, row: Mapping[str, Any]) -> None:
        """A row of metrics.jsonl: a step or an evaluation."""
        self._do(functools.partial(self._row, row))

    def catch_up(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Rows of before: they count, and are not shown one by one."""
        self._do(functools.partial(self._catch_up, list(rows)))

    def tick(self) -> None:
        """Show that time passes; a detached console does so itself."""
        self._do(self._tick)

    def end(self, text: str) -> None:
        """The last line."""
        self._do(lambda: self._faces[0].end(self._board, text), timeout_s=_TICK_S)

    def detach(self) -> None:
        """From now on a thread talks to the terminal. After everything that forks."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="console", daemon=True)
            self._thread.start()

    def close(self, timeout_s: float = 2.0) -> None:
        """Show what is left, for at most `timeout_s`. Safe to call twice."""
        if self._thread is not None:
            self._do(None, timeout_s=timeout_s)
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                self.lost += self._acts.qsize()
                self.error = self.error or "the terminal does not take what is written"
                return
            self._thread = None
        for face in self._faces:
            self._guarded(face.close)
        self._close()

    def _start(self, settings: RunSettings, *, where: str, with_table: bool) -> None:
        self._board = Board(settings)
        self._faces[0].start(self._board, where=where, with_table=with_table)

    def _row(self, row: Mapping[str, Any]) -> None:
        assert self._board is not None, "a row before the start"
        warnings = self._board.add(row)
        for warning in warnings:
            self._faces[0].note(warning, is_warning=True)
        if "eval_version" in row:
            self._faces[0].evaluated(self._board)
        elif "step" in row:
            self._faces[0].stepped(self._board)

    def _catch_up(self, rows: list[Mapping[str, Any]]) -> None:
        assert self._board is not None, "a row before the start"
        for row in rows:
            self._board.add(row)
        self._faces[0].caught_up(self._board)

    def _tick(self) -> None:
        if self._board is not None:
            self._faces[0].tick(self._board)

    def _do(self, act: Callable[[], None] | None, *, timeout_s: float = 0.0) -> None:
        if self._thread is None:
            if act is not None:
                self._guarded(act)
            return
        try:
            self._acts.put(act, block=timeout_s > 0, timeout=timeout_s)
        except queue.Full:
            self.lost += 1
            self.error = f"{self._acts.maxsize} steps wait for the terminal"

    def _guarded(self, act: Callable[[], None]) -> None:
        """The edge: whatever a face raises is counted, and the next face goes on."""
        try:
            act()
        except Exception as error:
            self.lost += 1
            self.error = f"{type(error).__name__}: {error}"
            if len(self._faces) > 1:
                self._guarded(self._faces.pop(0).close)

    def _run(self) -> None:
        while True:
            try:
                act = self._acts.get(timeout=_TICK_S)
            except queue.Empty:
                act = self._tick
            if act is None:
                return
            self._guarded(act)


def open_console(*, quiet: bool = False, stdout: TextIO | None = None, stderr: TextIO | None = None) -> Console:
    """The console that fits: live on a terminal that can move its cursor, plain lines elsewhere; quiet has warnings and the last line."""
    out, err = Output(stdout or sys.stdout), Output(stderr or sys.stderr)

    def close() -> None:
        out.close()
        err.close()

    if quiet:
        return Console(PlainFace(lambda line: None, warn=err.line, last=out.line), close=close)
    plain = PlainFace(out.line)
    if not out.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return Console(plain, close=close)
    from asyncrl.observe.live import LiveFace

    return Console(LiveFace(out), plain, close=close)
