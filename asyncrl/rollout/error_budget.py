"""How many rollouts may fail before the run is not worth going on: a share of the newest ones, of the run's and of each source's."""

from __future__ import annotations

from collections import Counter, deque

from asyncrl.errors import ConfigError, RunAborted
from asyncrl.types import Status

WINDOW_ROLLOUTS = 64
"""Wide enough that chance does not end a run: where one rollout in five fails, more than half of 64 do once in fifty million windows."""


class ErrorBudget:
    """Told of every rollout that ends; raises RunAborted for one failure more than `max_frac` of the last 64 allows.

    A source has a window of its own: one whose reward is broken would otherwise be dropped group by group while the others train.

    Args:
        max_frac: at least 0, below 1: a run in which everything fails always ends.
    """

    def __init__(self, max_frac: float) -> None:
        if not 0 <= max_frac < 1:
            raise ConfigError("run.error_budget", value=max_frac, allowed="a share of rollouts, at least 0 and below 1",
                              remedy="0 ends the run at the first failure, 0.5 when more than half of the newest 64 rollouts fail.")
        self._max_frac = max_frac
        self._ended = 0
        self._newest: dict[str | None, deque[Status]] = {}
        self._counts: Counter[Status] = Counter()

    def ended(self, status: Status, *, source: str, error: str) -> None:
        """A rollout has ended. Raises RunAborted with the counts by kind and the text of this failure when it is one too many."""
        self._ended += 1
        if status.is_error:
            self._counts[status] += 1
        for name in (None, source):
            newest = self._newest.setdefault(name, deque(maxlen=WINDOW_ROLLOUTS))
            newest.append(status)
            failed = sum(status.is_error for status in newest)
            if status.is_error and failed > int(self._max_frac * WINDOW_ROLLOUTS):
                raise RunAborted(self._message(failed, len(newest), status, source=name, error=error))

    def _message(self, failed: int, of: int, status: Status, *, source: str | None, error: str) -> str:
        whose = "" if source is None else f" of source {source!r}"
        kinds = ", ".join(f"{count} {status.value}" for status, count in self._counts.most_common())
        return (f"{failed} of the last {of} rollouts{whose} failed, more than run.error_budget = {self._max_frac:g} of {WINDOW_ROLLOUTS} "
                f"allows. Failures of the whole run, {self._ended} rollouts: {kinds}. Mend the cause, or raise run.error_budget. "
                f"The newest, {status.value}: {error or 'no further text'}")
