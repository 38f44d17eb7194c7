"""What the snapshot held before a publication moved it on, as long as that is not too much to keep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from asyncrl.weights.encoder import Undo
from asyncrl.weights.piece_bits import Stretch
from asyncrl.weights.snapshot import Snapshot


class UndoLog:
    """Old bits by stretch, up to `most_bytes`; beyond them the log is lost, and what is kept no more cannot be played back."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._kept: list[tuple[Stretch, Undo]] | None = []
        self.bytes = 0
        """Memory it takes."""

    def add(self, stretch: Stretch, undo: Undo) -> None:
        """Remember what a stretch held."""
        if self._kept is None or not len(undo.olds):
            return
        self._kept.append((stretch, undo))
        self.bytes += undo.bytes
        if self.bytes > self._most_bytes:
            self.lose()

    def lose(self) -> None:
        """What the snapshot held is overwritten and not remembered."""
        self._kept, self.bytes = None, 0

    @contextmanager
    def lost_meanwhile(self) -> Iterator[None]:
        """The snapshot moves inside, and how far is known only when it is done."""
        kept, self._kept = self._kept, None
        yield
        self._kept = kept

    def play_back(self, snapshot: Snapshot) -> bool:
        """Put everything back and forget it; False when the log was lost."""
        kept = self._kept
        for stretch, undo in reversed(kept or ()):
            snapshot.undo(stretch, undo)
        self.clear()
        return kept is not None

    def clear(self) -> None:
        """There is nothing to put back."""
        self._kept, self.bytes = [], 0
