"""The order in which continuous batching serves requests: first come, first served, and never a standstill.

When the cache is full, transformers sets requests back and lets none in until one *finishes*. Where all that ran are cancelled instead,
as at an update that recomputes, none ever does, and those set back would wait for ever.
"""

from __future__ import annotations

import time

from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor
from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState
from transformers.generation.continuous_batching.scheduler import FIFOScheduler

from asyncrl.errors import EngineError

STANDSTILL_S = 10.0
"""How long requests may be there and none be taken before the engine gives up. Room that is freed is seen at the next step, at once."""


class Scheduler(FIFOScheduler):
    """Transformers' own, in which a cancelled request lets waiting ones in as a finished one does."""

    _still_since_s: float | None = None
    _began_s: float | None = None
    _read_frac = 0.0
    _passes_s = (0.0, 0.0)

    def clear_cancelled_requests(self) -> list[RequestState]:
        """Give up what was cancelled; the room is for whoever waits."""
        cancelled = super().clear_cancelled_requests()
        if cancelled:
            self.block_new_requests = False
        return cancelled

    def schedule_batch(self, token_budget: int, cache_budget: int) -> tuple[list[FutureRequestState] | None, bool, int, int]:
        """The next batch. Raises EngineError when there has been none for `STANDSTILL_S` though requests are there."""
        self._pass_ended()
        batch = super().schedule_batch(token_budget, cache_budget)
        self._pass_begins(batch[0] or [])
        if batch[0] != []:
            self._still_since_s = None
            return batch
        self._still_since_s = self._still_since_s or time.monotonic()
        if time.monotonic() - self._still_since_s > STANDSTILL_S:
            raise EngineError(f"none of {len(self.active_requests)} active and {len(self.waiting_requests)} waiting requests has been "
                              f"taken for {STANDSTILL_S:g} s; {self.cache.compute_free_capacity():.0%} of the cache is free, new requests "
                              f"are {'kept out' if self.block_new_requests else 'let in'}")
        return batch

    def take_passes_s(self) -> tuple[float, float]:
        """Seconds of prefill and of decode since the last call, from one batch to the next; a batch of both is shared by its tokens."""
        taken, self._passes_s = self._passes_s, (0.0, 0.0)
        return taken

    def _pass_begins(self, batch: list[FutureRequestState]) -> None:
        tokens = sum(request.query_length for request in batch)
        if tokens:
            written = sum(request.query_length for request in batch if request.state.generated_tokens)
            self._began_s, self._read_frac = time.monotonic(), 1.0 - written / tokens

    def _pass_ended(self) -> None:
        if self._began_s is not None:
            took_s, self._began_s = time.monotonic() - self._began_s, None
            prefill_s, decode_s = self._passes_s
            self._passes_s = prefill_s + took_s * self._read_frac, decode_s + took_s * (1.0 - self._read_frac)


def replace_scheduler(processor: ContinuousBatchProcessor) -> None:
    """Have `processor`, which has served nothing yet, schedule with `Scheduler`."""
    given = processor.scheduler
    if type(given) is not FIFOScheduler or given.has_pending_requests():
        raise EngineError(f"continuous batching schedules with {type(given).__name__}, against its configuration")
    processor.scheduler = processor.offloading_manager.scheduler = Scheduler(
        given.cache, given.safety_margin, max_requests_per_batch=given.max_requests_per_batch)
