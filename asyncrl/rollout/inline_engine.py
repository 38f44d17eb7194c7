"""Generation in the calling process: batches in waves, a random stream per request, the same bits every time."""

from __future__ import annotations

import asyncio
import resource
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.clock import now_s
from asyncrl.errors import ChildDied, EngineError, WeightSyncError
from asyncrl.lora_config import read_lora
from asyncrl.paths import RunPaths
from asyncrl.process import release_free_memory, resident_bytes
from asyncrl.rollout.config import InlineEngineConfig
from asyncrl.rollout.engine import Ack, Chunk, GenerationRequest, Health, Interruption, Slept
from asyncrl.rollout.mailbox import Mailbox
from asyncrl.rollout.model_files import budget_tokens, read_facts, refuse_unservable
from asyncrl.settings import validated
from asyncrl.types import NOT_SAMPLED, Status
from asyncrl.weights.manifest import Manifest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from asyncrl.expert_routing import Routing
    from asyncrl.rollout.inline_wave import Row, Wave
    from asyncrl.rollout.released_weights import ReleasableWeights
    from asyncrl.weights.receiver import Receiver


class InlineEngine:
    """Requests that are waiting when a wave starts are sampled together, in arrival order, and the wave runs to its end.

    Requests that name a wave share it with those of the same name alone. The same requests in the same order give the same bits.
    Every token blocks the event loop for one forward pass. `settings` are the fields of `InlineEngineConfig`, `lora` is what the trainer
    has. Raises ConfigError.
    """

    def __init__(self, model: str | Path, *, name: str = "inline", lora: Any = "none", **settings: Any) -> None:
        self.name = name
        self._lora = read_lora(lora)
        self._config = validated(InlineEngineConfig, settings, name="engine")
        self._facts = read_facts(model, context_tokens=self._config.context_tokens)
        self.capabilities = self._config.capabilities(context_tokens=self._facts.context_tokens).serving(self._lora)
        self._model: PreTrainedModel | None = None
        self._routing: Routing | None = None
        self._weights: ReleasableWeights | None = None
        self._receiver: Receiver | None = None
        self._asleep = False
        self._runner: asyncio.Task[None] | None = None
        self._waiting: deque[Row] = deque()
        self._wave: Wave | None = None
        self._paused: Interruption | None = Interruption.DRAIN
        self._paused_at_s = 0.0
        self._draining = False
        self._changed = asyncio.Event()
        self._wave_ended = asyncio.Event()
        self._gone = ""

    async def start(self, paths: RunPaths) -> None:
        """Load the model, for the first time or after `close`. The engine is paused, and holds no version, until an anchor is applied."""
        from asyncrl.rollout.loaded_model import load_model, model_routing
        from asyncrl.rollout.released_weights import ReleasableWeights
        from asyncrl.weights.ends import TransportSpec, source_of
        from asyncrl.weights.receiver import Receiver

        self._model = load_model(self._facts.folder, dtype=self._config.dtype, lora=self._lora)
        self._routing = model_routing(self._model) if self._facts.has_experts else None
        self._weights = ReleasableWeights(self._model)
        self._receiver = Receiver(self._weights.targets(), source=source_of(TransportSpec.of(paths)))
        self._paused, self._asleep, self._gone = Interruption.DRAIN, False, ""
        self._runner = asyncio.create_task(self._run(), name=f"engine {self.name}")

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """See `Engine.generate`. Waits for: the next wave, and `resume` while paused."""
        from asyncrl.rollout.inline_wave import Row

        refuse_unservable(request, self._facts, capabilities=self.capabilities)
        self._check_alive()
        row = Row(request, budget_tokens(request, self._facts), Mailbox())
        self._waiting.append(row)
        self._changed.set()
        try:
            async for chunk in row.mailbox.read():
                yield chunk
        finally:
            if not row.mailbox.finished:
                self._cancel(row)

    async def pause(self, kind: Interruption) -> None:
        """See `Engine.pause`. Waits for: the end of the wave, when draining."""
        self._check_alive()
        self._paused_at_s = now_s()
        if kind is Interruption.DRAIN:
            await self._drain()
        self._paused = kind
        for row in self._wave.rows if self._wave else ():
            self._deliver(row)

    async def fetch(self, manifest: Manifest) -> None:
        """See `Engine.fetch`. Nothing is sampled meanwhile: there is one thread."""
        self._check_alive()
        if self._receiver is None or self._asleep:
            raise WeightSyncError(f"engine {self.name} has no memory for weights: it was not started, or is asleep")
        self._receiver.fetch(manifest)

    async def apply(self, manifest: Manifest) -> Ack:
        """See `Engine.apply`."""
        self._check_alive()
        if self._paused is None or self._receiver is None:
            raise WeightSyncError(f"engine {self.name}: weights are applied only between pause and resume")
        if self._asleep:
            raise WeightSyncError(f"engine {self.name} is asleep: it has no memory for weights before it wakes")
        before = self._receiver.state_hash
        state_hash = self._receiver.apply(manifest)
        recomputed_tokens = 0
        if self._wave and self._paused is Interruption.RECOMPUTE:
            recomputed_tokens = self._wave.cached_tokens
            self._wave.forget_cache()
        elif self._wave and state_hash != before:
            self._wave.mark_stale()
        return Ack(manifest.version, state_hash, pause_s=now_s() - self._paused_at_s, recomputed_tokens=recomputed_tokens)

    async def resume(self) -> None:
        """See `Engine.resume`. Raises WeightSyncError while the engine holds no version it could stamp tokens with."""
        self._check_alive()
        if self._version == NOT_SAMPLED:
            reason = (self._receiver and self._receiver.poisoned) or "none has been applied"
            raise WeightSyncError(f"engine {self.name} holds no version to sample from: {reason}")
        self._paused = None
        self._changed.set()

    async def sleep(self) -> Slept:
        """See `Engine.sleep`. The caches of a wave are gone with its last request."""
        self._check_alive()
        if self._paused is None or self._wave is not None or self._asleep:
            raise EngineError(f"engine {self.name} cannot sleep: it is asleep, not paused, or in the middle of a wave")
        assert self._weights is not None
        assert self._receiver is not None
        before_bytes = resident_bytes()
        self._asleep = True
        self._receiver.release("its memory was given back")
        freed_bytes = self._weights.release()
        release_free_memory()
        return Slept(freed_bytes, before_bytes, resident_bytes())

    async def wake(self) -> None:
        """See `Engine.wake`."""
        self._check_alive()
        if not self._asleep:
            raise EngineError(f"engine {self.name} cannot wake: it is not asleep")
        assert self._weights is not None
        assert self._receiver is not None
        self._weights.restore()
        self._receiver.rebind(self._weights.targets())
        self._asleep = False

    async def health(self) -> Health:
        """See `Engine.health`."""
        self._check_alive()
        running = len(self._wave.rows) if self._wave else 0
        return Health(self._version, running, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)

    async def close(self) -> None:
        """See `Engine.close`. Open requests end with ChildDied."""
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.gather(self._runner, return_exceptions=True)
        self._end("it was closed")
        self._model = self._weights = self._receiver = None

    @property
    def _version(self) -> int:
        held = self._receiver.version if self._receiver else None
        return NOT_SAMPLED if held is None else held

    async def _run(self) -> None:
        """Produces: chunks. Consumes: waiting requests, in waves. Waits for: requests, and `resume` while paused."""
        try:
            while True:
                await self._run_wave(await self._next_rows())
        except Exception as error:  # whatever broke a forward pass ends the engine, and every request hears of it
            self._end(f"generation failed with {error!r}")

    async def _next_rows(self) -> list[Row]:
        seen = -1
        while True:
            if self._paused is not None or self._draining or not self._waiting:
                self._changed.clear()
                await self._changed.wait()
            elif seen != len(self._waiting):
                # a tick without arrivals ends the gathering, so that requests started together share a wave
                seen = len(self._waiting)
                await asyncio.sleep(0)
            else:
                return self._take_wave()

    def _take_wave(self) -> list[Row]:
        """The oldest waiting row, and those that may be sampled with it."""
        name = self._waiting[0].request.wave
        rows = [row for row in self._waiting if row.request.wave == name][:self._config.max_batch_requests]
        taken = {id(row) for row in rows}
        self._waiting = deque(row for row in self._waiting if id(row) not in taken)
        return rows

    async def _run_wave(self, rows: list[Row]) -> None:
        from asyncrl.rollout.inline_wave import Wave

        assert self._model is not None
        wave = self._wave = Wave(self._model, rows, eos_tokens=self._facts.eos_tokens, threads=self._config.threads,
                                 logit_noise=self._config.logit_noise, routing=self._routing)
        self._wave_ended.clear()
        while wave.rows:
            if self._paused is not None:
                self._changed.clear()
                await self._changed.wait()
                continue
            for row, status in wave.step():
                self._deliver(row, finish=status)
            await asyncio.sleep(0)
        self._wave = None
        self._wave_ended.set()

    async def _drain(self) -> None:
        self._draining = True
        try:
            if self._wave is not None and self._paused is None:
                await self._wave_ended.wait()
            self._check_alive()
        finally:
            self._draining = False
            self._changed.set()

    def _deliver(self, row: Row, finish: Status | None = None) -> None:
        if finish is Status.NONFINITE_LOGPROB:
            self._deliver(row)
        tokens, logprobs, records = row.take()
        if len(tokens) or finish is not None:
            row.mailbox.put(Chunk(tokens, logprobs, self._version, row.kv_fresh, finish, records))

    def _cancel(self, row: Row) -> None:
        if row in self._waiting:
            self._waiting.remove(row)
        elif self._wave is not None:
            self._wave.drop(row)
            self._changed.set()

    def _end(self, reason: str) -> None:
        self._gone = self._gone or f"engine {self.name} is gone: {reason}"
        for row in [*self._waiting, *(self._wave.rows if self._wave else ())]:
            row.mailbox.fail(ChildDied(self._gone))
        self._waiting.clear()
        self._wave = None
        self._wave_ended.set()

    def _check_alive(self) -> None:
        if self._gone:
            raise ChildDied(self._gone)
