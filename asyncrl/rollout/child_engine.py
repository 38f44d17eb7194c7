"""The controller's side of an engine that lives in a child process; needs neither torch nor an engine's own packages.

    chunks            a stream that never ends: {version, passes: [prefill s, decode s] or nothing, rows: [[key, count, kv_fresh, finish,
                      error, has kept sets, expert rows]]} with tokens, logprobs and, where some were wanted, records
    requests          {new: [[key, prompt tokens, budget, temperature, stop, truncation, wanted]], cancelled: [key]} with all prompts in a
                      row; a truncation is [top_p, top_k or 0, min_p], wanted is [kept sets, routed experts]
    hold              {} → {running: [key]}; starts no more requests until resume
    pause             {kind} → {messages: how many chunk messages were sent so far}
    apply             {manifest} → {state_hash, pause_s, recomputed_tokens}
    sleep             {} → {freed_bytes, resident_bytes_before, resident_bytes}
    resume · wake · health
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncrl.channel import Reply
from asyncrl.child import Child
from asyncrl.errors import AbortNotHonoured, ChildDied, EngineError
from asyncrl.paths import RunPaths
from asyncrl.rollout.chunk_stream import records_of
from asyncrl.rollout.engine import Ack, Capabilities, Chunk, GenerationRequest, Health, Interruption, Passes, Slept, require_sleep
from asyncrl.rollout.mailbox import Mailbox
from asyncrl.rollout.model_files import ModelFacts, budget_tokens, refuse_unservable
from asyncrl.types import Status
from asyncrl.weights.ends import TransportSpec
from asyncrl.weights.manifest import Manifest

_PAUSE_TIMEOUT_S = 60.0
"""A pause waits for one forward pass, never for a request."""
_CALL_TIMEOUT_S = 600.0
"""Beyond what a caller would wait for; the child answers at once, or after the weights of a large model are written."""
_START_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Launch:
    """How the child is started."""

    module: str
    """Its `serve` speaks the protocol above."""
    spec: Mapping[str, Any]
    """For `serve`, which gets the way that weights come, a `TransportSpec`, as `transport` beside it."""
    env: Mapping[str, str]
    close_timeout_s: float = 2.0
    """For an orderly end, before it is killed."""


class ChildEngine:
    """One engine in a child process. Results are not streamed: a request's tokens come when it ends, and at each pause.

    Requests that start in one tick of the loop travel as one message, and so do the results that come at one time.
    """

    def __init__(self, name: str, *, capabilities: Capabilities, facts: ModelFacts, launch: Launch) -> None:
        self.name, self.capabilities = name, capabilities
        self._facts, self._launch = facts, launch
        self._child: Child | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._keys = itertools.count()
        self._open: dict[str, Mailbox] = {}
        self._new: dict[str, GenerationRequest] = {}
        self._cancelled: list[str] = []
        self._outgoing = asyncio.Event()
        self._messages = 0
        self._progress = asyncio.Event()
        self._gone: ChildDied | None = None

    async def start(self, paths: RunPaths) -> None:
        """Start the child, for the first time or after `close`, and load the model. Paused, without a version, until an anchor is applied.

        Raises ChildDied, TimeoutError, or the error that the child's set-up raised.
        """
        spec = {**self._launch.spec, "transport": TransportSpec.of(paths, engine=self.name).to_wire()}
        self._child = await Child.start(self._launch.module, name=self.name, spec=spec, logs=paths.logs, env=self._launch.env,
                                        start_timeout_s=_START_TIMEOUT_S)
        self._gone, self._messages = None, 0
        self._tasks = [asyncio.create_task(self._watch(work)) for work in (self._receive(self._child), self._send(self._child))]

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """See `Engine.generate`."""
        refuse_unservable(request, self._facts, capabilities=self.capabilities)
        self._live_child()
        key, mailbox = str(next(self._keys)), Mailbox()
        self._open[key], self._new[key] = mailbox, request
        self._outgoing.set()
        try:
            async for chunk in mailbox.read():
                yield chunk
        finally:
            if self._open.pop(key, None) is not None and self._new.pop(key, None) is None:
                self._cancelled.append(key)
                self._outgoing.set()
                self._progress.set()

    async def pause(self, kind: Interruption) -> None:
        """See `Engine.pause`. Waits for: one forward pass; when draining, the end of all that runs."""
        child = self._live_child()
        if kind is Interruption.DRAIN:
            running = set((await child.call("hold", timeout_s=_CALL_TIMEOUT_S)).body["running"])
            await self._until(lambda: running.isdisjoint(self._open))
        try:
            messages = (await child.call("pause", {"kind": kind.value}, timeout_s=_PAUSE_TIMEOUT_S)).body["messages"]
        except TimeoutError as error:
            raise AbortNotHonoured(f"engine {self.name} did not stop sampling: {error}") from error
        await self._until(lambda: self._messages >= messages)

    async def fetch(self, manifest: Manifest) -> None:
        """See `Engine.fetch`."""
        await self._live_child().call("fetch", {"manifest": manifest.to_json()}, timeout_s=_CALL_TIMEOUT_S)

    async def apply(self, manifest: Manifest) -> Ack:
        """See `Engine.apply`."""
        body = (await self._live_child().call("apply", {"manifest": manifest.to_json()}, timeout_s=_CALL_TIMEOUT_S)).body
        return Ack(manifest.version, body["state_hash"], pause_s=body["pause_s"], recomputed_tokens=body["recomputed_tokens"])

    async def resume(self) -> None:
        """See `Engine.resume`. Raises WeightSyncError while the engine holds no version it could stamp tokens with."""
        await self._live_child().call("resume", timeout_s=_CALL_TIMEOUT_S)

    async def sleep(self) -> Slept:
        """See `Engine.sleep`."""
        require_sleep(self.capabilities, engine=self.name)
        return Slept(**(await self._live_child().call("sleep", timeout_s=_CALL_TIMEOUT_S)).body)

    async def wake(self) -> None:
        """See `Engine.wake`."""
        await self._live_child().call("wake", timeout_s=_CALL_TIMEOUT_S)

    async def health(self) -> Health:
        """See `Engine.health`."""
        return Health(**(await self._live_child().call("health", timeout_s=_CALL_TIMEOUT_S)).body)

    async def close(self) -> None:
        """See `Engine.close`. Open requests end with ChildDied."""
        self._end(ChildDied(f"engine {self.name} was closed"))
        if self._child is not None:
            await self._child.close(self._launch.close_timeout_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _send(self, child: Child) -> None:
        """Consumes: new and cancelled requests. Waits for: either. On close: cancelled."""
        while True:
            await self._outgoing.wait()
            self._outgoing.clear()
            new, self._new = self._new, {}
            cancelled, self._cancelled = self._cancelled, []
            rows = [(key, len(request.tokens), budget_tokens(request, self._facts), float(request.sampling.temperature),
                     request.sampling.stop, (request.sampling.top_p, request.sampling.top_k or 0, request.sampling.min_p),
                     (request.wanted.kept_sets, request.wanted.routed_experts)) for key, request in new.items()]
            tokens = np.concatenate([request.tokens for request in new.values()]) if new else np.zeros(0, np.int32)
            await child.call("requests", {"new": rows, "cancelled": cancelled}, arrays={"tokens": tokens}, timeout_s=_CALL_TIMEOUT_S)

    async def _receive(self, child: Child) -> None:
        """Produces: chunks. Waits for: results of the child. On its death: every open request hears of it."""
        async for reply in child.stream("chunks"):
            self._accept(reply)
            self._messages += 1
            self._progress.set()

    def _accept(self, reply: Reply) -> None:
        version, rows, start = reply.body["version"], reply.body["rows"], 0
        passes = Passes(*reply.body["passes"]) if reply.body.get("passes") else None
        for (key, count, kv_fresh, finish, error, *_), records in zip(rows, records_of(rows, reply.arrays), strict=True):
            end = start + count
            mailbox = self._open.pop(key, None) if finish else self._open.get(key)
            if mailbox is not None and finish == Status.ENGINE_ERROR.value:
                mailbox.fail(EngineError(error))
            elif mailbox is not None:
                mailbox.put(Chunk(tokens=reply.arrays["tokens"][start:end], logprobs=reply.arrays["logprobs"][start:end],
                                  policy_version=version, kv_fresh=kv_fresh, finish=Status(finish) if finish else None, records=records,
                                  passes=passes))
                passes = None
            start = end

    async def _watch(self, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except Exception as error:  # whatever it was, nobody serves the open requests any more, and each must hear of it
            self._end(error if isinstance(error, ChildDied) else ChildDied(f"engine {self.name} is out of step: {error!r}"))

    def _end(self, error: ChildDied) -> None:
        self._gone = self._gone or error
        for mailbox in self._open.values():
            mailbox.fail(ChildDied(str(self._gone)))
        for unsent in (self._open, self._new, self._cancelled):
            unsent.clear()
        self._progress.set()

    async def _until(self, predicate: Callable[[], bool]) -> None:
        while self._gone is None and not predicate():
            self._progress.clear()
            await self._progress.wait()
        self._live_child()

    def _live_child(self) -> Child:
        if self._gone is not None:
            raise ChildDied(str(self._gone))
        assert self._child is not None, "start() comes first"
        return self._child
