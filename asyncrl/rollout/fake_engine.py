"""A scripted engine for tests: a function writes the tokens, the running loop's clock times them, faults are injected at will."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import numpy as np

from asyncrl.clock import now_s
from asyncrl.errors import AbortNotHonoured, ChildDied, EngineError, WeightSyncError, WrongBase
from asyncrl.paths import RunPaths
from asyncrl.rollout.engine import Ack, Capabilities, Chunk, GenerationRequest, Health, Interruption, Slept
from asyncrl.rollout.mailbox import Mailbox
from asyncrl.types import NOT_SAMPLED, Status
from asyncrl.weights.manifest import Manifest

Policy = Callable[[GenerationRequest, int, int], tuple[int, float | None]]
"""(request, index of the token in the completion, policy version) -> token and logprob. May raise what an engine may raise."""


def counting_policy(request: GenerationRequest, index: int, version: int) -> tuple[int, float]:
    """A token that tells its place, 2 … 9, and a logprob that tells place and version: −(1 + version) − index / 64."""
    return 2 + (len(request.tokens) + index) % 8, -(1.0 + version) - index / 64


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong; set `FakeEngine.faults` at any time."""

    abort_ignored: bool = False
    """`pause` does not stop the sampling, and says so with AbortNotHonoured."""
    hang_after_tokens: int | None = None
    """Requests stop for ever after so many tokens."""
    logprob_offset: float = 0.0
    pause_s: float = 0.0
    """How long sampling goes on before a pause takes hold."""
    fetch_s: float = 0.0
    """How long a fetch takes."""
    fetch_error: str = ""
    """Text of the WeightSyncError that every fetch ends with."""
    apply_error: str = ""
    """Text of the WeightSyncError that every apply ends with; the version stays."""
    apply_s: float = 0.0
    """How long an apply takes."""
    wrong_hash: bool = False
    """The acknowledged state hash is off by one."""
    resume_s: float = 0.0
    """How long a resume takes."""
    resume_error: str = ""
    """Text of the EngineError that every resume ends with: it stays paused."""
    dies_in: str = ""
    """Name of a method, `fetch`, `pause`, `apply` or `resume`, that the engine dies in, at once."""
    start_error: str = ""
    """Text of the EngineError that every start ends with."""
    sleep_error: str = ""
    """Text of the EngineError that every sleep ends with."""
    wake_error: str = ""
    """Text of the EngineError that every wake ends with: the engine stays asleep."""
    stale_prefix_cache: bool = False
    """The cache of first-token results, keyed by prompt, survives an update: a known prompt is answered by its old version."""


@dataclass(slots=True, eq=False)
class _Row:
    request: GenerationRequest
    budget_tokens: int
    mailbox: Mailbox = field(default_factory=Mailbox)
    undelivered: list[tuple[int, float | None]] = field(default_factory=list)
    sampled_tokens: int = 0
    kv_fresh: bool = True

    @property
    def cached_tokens(self) -> int:
        return len(self.request.tokens) + self.sampled_tokens - 1


class FakeEngine:
    """Keeps the engine contract on any event loop, virtual ones included.

    A request that starts at t has its n-th token at t + n · token_s, so a pause at t + (n + ½) · token_s lands right after token n.
    `calls` records (method, argument) of every call. One that `catches_up` finds the deltas up to a newer base, as in a store.
    """

    def __init__(self, policy: Policy = counting_policy, *, name: str = "fake", token_s: float = 1.0, context_tokens: int = 4096,
                 eos_tokens: frozenset[int] = frozenset(), in_place_recompute: bool = True, catches_up: bool = False) -> None:
        self.name = name
        self.capabilities = Capabilities(
            interruptions=frozenset(Interruption), in_place_recompute=in_place_recompute, per_request_seed=True,
            per_request_temperature=True, stop_strings=False, bit_reproducible=True, context_tokens=context_tokens,
            sleep=True)
        self.faults = Faults()
        self.calls: list[tuple[str, object]] = []
        self.version = NOT_SAMPLED
        self._policy, self._token_s, self._eos_tokens = policy, token_s, eos_tokens
        self._catches_up = catches_up
        self._rows: dict[_Row, asyncio.Task[None]] = {}
        self._prefix_cache: dict[bytes, int] = {}
        self._paused: Interruption | None = Interruption.DRAIN
        self._paused_at_s = 0.0
        self._interrupted_tokens = 0
        self._asleep = False
        self._changed = asyncio.Condition()
        self._gone = ""

    @property
    def running_requests(self) -> int:
        """Requests that have not ended, waiting ones included."""
        return len(self._rows)

    async def start(self, paths: RunPaths) -> None:
        """Nothing to load. Paused, without a version, until an anchor is applied."""
        self.calls.append(("start", paths))
        if self.faults.start_error:
            raise EngineError(self.faults.start_error)
        self.version, self._paused, self._asleep, self._gone = NOT_SAMPLED, Interruption.DRAIN, False, ""
        self._prefix_cache.clear()

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """See `Engine.generate`."""
        self.calls.append(("generate", request))
        self._check_alive()
        context_tokens = self.capabilities.context_tokens
        if not 0 < len(request.tokens) < context_tokens:
            raise EngineError(f"request {request.request_id}: {len(request.tokens)} prompt tokens, context {context_tokens}")
        row = _Row(request, min(request.sampling.max_new_tokens, context_tokens - len(request.tokens)))
        self._rows[row] = asyncio.create_task(self._write(row), name=f"{self.name} {request.request_id}")
        try:
            async for chunk in row.mailbox.read():
                yield chunk
        finally:
            if not row.mailbox.finished:
                self.calls.append(("cancel", request.request_id))
                self._end(row)

    async def pause(self, kind: Interruption) -> None:
        """See `Engine.pause`."""
        self._enter("pause", kind)
        self._paused_at_s = now_s()
        await asyncio.sleep(self.faults.pause_s)
        if self.faults.abort_ignored:
            raise AbortNotHonoured(f"engine {self.name} goes on sampling {len(self._rows)} requests")
        was_paused, self._paused = self._paused, kind
        if kind is Interruption.DRAIN and was_paused is None:
            async with self._changed:
                await self._changed.wait_for(lambda: self._gone or not any(row.sampled_tokens for row in self._rows))
            self._check_alive()
        self._interrupted_tokens = sum(self._interrupt(row, kind) for row in list(self._rows))

    async def fetch(self, manifest: Manifest) -> None:
        """See `Engine.fetch`."""
        self._enter("fetch", manifest)
        await asyncio.sleep(self.faults.fetch_s)
        if self.faults.fetch_error:
            raise WeightSyncError(self.faults.fetch_error)

    async def apply(self, manifest: Manifest) -> Ack:
        """See `Engine.apply`."""
        self._enter("apply", manifest)
        if self._paused is None:
            raise WeightSyncError(f"engine {self.name}: weights are applied only between pause and resume")
        if self._asleep:
            raise WeightSyncError(f"engine {self.name} is asleep")
        if manifest.base is not None and not (self.version == manifest.base or (self._catches_up and 0 <= self.version < manifest.base)):
            raise WrongBase(f"engine {self.name} holds version {self.version}, the delta needs {manifest.base}")
        if self.faults.apply_error:
            raise WeightSyncError(self.faults.apply_error)
        await asyncio.sleep(self.faults.apply_s)
        changed, self.version = manifest.version != self.version, manifest.version
        if not self.faults.stale_prefix_cache:
            self._prefix_cache.clear()
        started = [row for row in self._rows if row.sampled_tokens]
        for row in started if changed else ():
            row.kv_fresh = self._paused is Interruption.RECOMPUTE
        recomputed_tokens = self._interrupted_tokens + sum(row.cached_tokens for row in started if row.kv_fresh)
        return Ack(manifest.version, manifest.state_hash + self.faults.wrong_hash, pause_s=now_s() - self._paused_at_s,
                   recomputed_tokens=recomputed_tokens)

    async def resume(self) -> None:
        """See `Engine.resume`."""
        self._enter("resume", None)
        if self.version == NOT_SAMPLED:
            raise WeightSyncError(f"engine {self.name} holds no version to sample from: none has been applied")
        await asyncio.sleep(self.faults.resume_s)
        if self.faults.resume_error:
            raise EngineError(self.faults.resume_error)
        self._paused = None
        await self._notify()

    async def sleep(self) -> Slept:
        """See `Engine.sleep`."""
        self.calls.append(("sleep", None))
        self._check_alive()
        running = sum(row.sampled_tokens > 0 for row in self._rows)
        if self._paused is None or running or self._asleep or self.faults.sleep_error:
            raise EngineError(self.faults.sleep_error or f"engine {self.name} is not paused, asleep, or running {running} requests")
        self._asleep, self.version = True, NOT_SAMPLED
        return Slept(freed_bytes=1000, resident_bytes_before=3000, resident_bytes=2000)

    async def wake(self) -> None:
        """See `Engine.wake`."""
        self.calls.append(("wake", None))
        self._check_alive()
        if not self._asleep or self.faults.wake_error:
            raise EngineError(self.faults.wake_error or f"engine {self.name} is not asleep")
        self._asleep = False

    async def health(self) -> Health:
        """See `Engine.health`."""
        self.calls.append(("health", None))
        self._check_alive()
        return Health(self.version, len(self._rows), peak_memory_bytes=0)

    async def close(self) -> None:
        """See `Engine.close`."""
        self.calls.append(("close", None))
        self.die("it was closed")

    def die(self, reason: str = "killed by signal 9") -> None:
        """End the engine: every open request and every later call raises ChildDied."""
        self._gone = self._gone or f"engine {self.name} is gone: {reason}"
        for row in list(self._rows):
            row.mailbox.fail(ChildDied(self._gone))
            self._end(row)

    def _enter(self, name: str, argument: object) -> None:
        self.calls.append((name, argument))
        if self.faults.dies_in == name:
            self.die()
        self._check_alive()

    async def _write(self, row: _Row) -> None:
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._may_sample(row))
            await asyncio.sleep(self._token_s)
            if not self._may_sample(row):
                continue
            if row.sampled_tokens == self.faults.hang_after_tokens:
                await asyncio.Event().wait()
            try:
                finish = self._sample(row)
            except Exception as error:  # what the policy raises is the script's answer to the request
                row.mailbox.fail(error)
                finish = Status.ENGINE_ERROR
            if finish is not None:
                self._rows.pop(row, None)
                await self._notify()
                return

    def _may_sample(self, row: _Row) -> bool:
        draining = self._paused is Interruption.DRAIN and row.sampled_tokens > 0
        return self.version != NOT_SAMPLED and (self._paused is None or draining)

    def _sample(self, row: _Row) -> Status | None:
        version = self.version
        if row.sampled_tokens == 0:
            version = self._prefix_cache.setdefault(row.request.tokens.tobytes(), self.version)
        token, logprob = self._policy(row.request, row.sampled_tokens, version)
        row.undelivered.append((token, None if logprob is None else logprob + self.faults.logprob_offset))
        row.sampled_tokens += 1
        finish = Status.STOP if token in self._eos_tokens else Status.LENGTH if row.sampled_tokens == row.budget_tokens else None
        if finish is not None:
            self._deliver(row, finish)
        return finish

    def _interrupt(self, row: _Row, kind: Interruption) -> int:
        """Deliver what there is; returns how many cached tokens are given up."""
        resubmitted = kind is Interruption.RECOMPUTE and not self.capabilities.in_place_recompute and row.sampled_tokens > 0
        if row.undelivered or resubmitted:
            self._deliver(row, Status.INTERRUPTED if resubmitted else None)
        if resubmitted:
            self._end(row)
        return row.cached_tokens if resubmitted else 0

    def _deliver(self, row: _Row, finish: Status | None) -> None:
        tokens = np.asarray([token for token, _ in row.undelivered], dtype=np.int32)
        values = [logprob for _, logprob in row.undelivered]
        logprobs = None if None in values else np.asarray(values, dtype=np.float32)
        row.undelivered = []
        row.mailbox.put(Chunk(tokens, logprobs, self.version, row.kv_fresh, finish))  # type: ignore[arg-type]

    def _end(self, row: _Row) -> None:
        task = self._rows.pop(row, None)
        if task is not None:
            task.cancel()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _check_alive(self) -> None:
        if self._gone:
            raise ChildDied(self._gone)


def fake_manifest(version: int, *, base: int | None = None) -> Manifest:
    """A manifest without content, for engines that only look at versions; its state hash is 1000 + version."""
    return Manifest(run_epoch=0, version=version, base=base, parts=(), tensors=(), state_hash=1000 + version)
