"""When gradients that are not finite end a training. Needs no torch."""

from __future__ import annotations

from asyncrl.errors import RunAborted


class NonfiniteLimit:
    """Counts the steps in a row whose gradient was NaN or infinite, against `trainer.max_nonfinite_steps`."""

    def __init__(self, limit: int) -> None:
        self._limit, self._in_row = limit, 0

    def after_step(self, *, nonfinite: bool) -> None:
        """Take note of a step. Raises RunAborted when it is one too many."""
        self._in_row = self._in_row + 1 if nonfinite else 0
        if self._in_row >= self._limit:
            raise RunAborted(f"trainer.max_nonfinite_steps = {self._limit}: the gradient was NaN or infinite "
                             "in so many steps in a row; the weights are those before. Likely cause: a learning rate that is too high.")
