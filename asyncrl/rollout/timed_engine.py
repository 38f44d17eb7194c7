"""An engine whose every second is charged to one cause, as seen from the controller.

    down        it failed, or was closed, and has not resumed since
    evaluation  an evaluation, a probe or an export goes on; what runs belongs to no step
    paused      it stands still: from the end of its pause to its resume, asleep included; or the trainer holds the process they share
    idle        it has no request
    tail        it has fewer than half as many requests as it has had at once: what is left of a batch
    busy        the rest: decode, prefill and prefill of what was written before, by what the engine reports of its passes
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass

from asyncrl.clock import now_s
from asyncrl.errors import ChildDied
from asyncrl.paths import RunPaths
from asyncrl.rollout.engine import Ack, Capabilities, Chunk, Engine, GenerationRequest, Health, Interruption, Slept
from asyncrl.weights.manifest import Manifest

_TAIL_FRAC = 0.5
"""Of the most requests at once. A batch read by the same pass costs little less at half its size: below, the pass is mostly overhead."""


@dataclass(frozen=True, slots=True)
class EngineSeconds:
    """Seconds of one engine by cause; they sum to `whole_s`."""

    decode_s: float = 0.0
    prefill_s: float = 0.0
    reprefill_s: float = 0.0
    """Keys and values computed again of what had been written before: after an update, or on another engine."""
    tail_s: float = 0.0
    idle_s: float = 0.0
    paused_s: float = 0.0
    down_s: float = 0.0
    evaluation_s: float = 0.0
    whole_s: float = 0.0
    """What has passed, by the clock."""
    prefill_tokens: int = 0
    reprefill_tokens: int = 0
    decode_tokens: int = 0


class TimedEngine:
    """Passes everything on to `engine`, and keeps its account. Raises what that raises."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.name = engine.name
        self._running = self._most_running = 0
        self._is_down = self._is_paused = self._is_aside = self._is_blocked = False
        self._since_s: float | None = None
        self._taken_s = 0.0
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._busy_s: defaultdict[int, float] = defaultdict(float)
        self._passes_s: defaultdict[str, float] = defaultdict(float)
        self._tokens: Counter[str] = Counter()

    @property
    def capabilities(self) -> Capabilities:
        """Of the engine."""
        return self._engine.capabilities

    def begin(self) -> None:
        """The account begins now."""
        self.take()

    def aside(self, is_aside: bool) -> None:
        """An evaluation or probe begins, or ends."""
        self._charge()
        self._is_aside = is_aside

    def blocked(self, is_blocked: bool) -> None:
        """The trainer takes this process, or gives it back: an engine that lives in it stands still meanwhile."""
        self._charge()
        self._is_blocked = is_blocked and not self.capabilities.own_process

    def take(self) -> EngineSeconds:
        """The account since the last call."""
        self._charge()
        since_s, self._taken_s = self._taken_s, now_s()
        tail_s = sum(seconds for running, seconds in self._busy_s.items() if running < _TAIL_FRAC * self._most_running)
        work_s = sum(self._busy_s.values()) - tail_s
        tokens = self._tokens
        read = tokens["prefill"] + tokens["reprefill"]
        reported_s = sum(self._passes_s.values())
        # an engine that says nothing of its passes is split by tokens, each counted alike
        read_frac = self._passes_s["prefill"] / reported_s if reported_s else read / max(1, read + tokens["decode"])
        again_frac = tokens["reprefill"] / read if read else 0.0
        taken = EngineSeconds(
            decode_s=work_s * (1.0 - read_frac), prefill_s=work_s * read_frac * (1.0 - again_frac),
            reprefill_s=work_s * read_frac * again_frac, tail_s=tail_s,
            idle_s=self._seconds["idle"], paused_s=self._seconds["paused"], down_s=self._seconds["down"],
            evaluation_s=self._seconds["evaluation"], whole_s=self._taken_s - since_s,
            prefill_tokens=tokens["prefill"], reprefill_tokens=tokens["reprefill"],
            decode_tokens=tokens["decode"])
        self._seconds.clear()
        self._busy_s.clear()
        self._passes_s.clear()
        self._tokens.clear()
        return taken

    async def start(self, paths: RunPaths) -> None:
        """See `Engine.start`."""
        await self._engine.start(paths)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """See `Engine.generate`."""
        self._count("reprefill" if request.is_resubmitted else "prefill", len(request.tokens))
        self._run(1)
        try:
            async with aclosing(self._engine.generate(request)) as stream:  # type: ignore[type-var]
                async for chunk in stream:
                    self._count("decode", len(chunk.tokens))
                    if chunk.passes is not None and not self._is_aside:
                        self._passes_s["prefill"] += chunk.passes.prefill_s
                        self._passes_s["decode"] += chunk.passes.decode_s
                    yield chunk
        except ChildDied:
            self._fails()
            raise
        finally:
            self._run(-1)

    async def pause(self, kind: Interruption) -> None:
        """See `Engine.pause`. Until it returns the engine works."""
        with self._failing():
            await self._engine.pause(kind)
        self._charge()
        self._is_paused = True

    async def fetch(self, manifest: Manifest) -> None:
        """See `Engine.fetch`."""
        with self._failing():
            await self._engine.fetch(manifest)

    async def apply(self, manifest: Manifest) -> Ack:
        """See `Engine.apply`."""
        with self._failing():
            ack = await self._engine.apply(manifest)
        if self.capabilities.in_place_recompute:
            self._count("reprefill", ack.recomputed_tokens)
        return ack

    async def resume(self) -> None:
        """See `Engine.resume`. From here on the engine works, whatever it did before."""
        with self._failing():
            await self._engine.resume()
        self._charge()
        self._is_paused = self._is_down = False

    async def sleep(self) -> Slept:
        """See `Engine.sleep`."""
        with self._failing():
            return await self._engine.sleep()

    async def wake(self) -> None:
        """See `Engine.wake`."""
        with self._failing():
            await self._engine.wake()

    async def health(self) -> Health:
        """See `Engine.health`."""
        return await self._engine.health()

    async def close(self) -> None:
        """See `Engine.close`."""
        self._fails()
        await self._engine.close()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Who asks gives an engine up that raises, or that is no longer waited for."""
        try:
            yield
        except BaseException:
            self._fails()
            raise

    def _fails(self) -> None:
        self._charge()
        self._is_down = True

    def _run(self, change: int) -> None:
        self._charge()
        self._running += change
        if not self._is_aside:
            self._most_running = max(self._most_running, self._running)

    def _count(self, kind: str, tokens: int) -> None:
        if not self._is_aside:
            self._tokens[kind] += tokens

    def _charge(self) -> None:
        """Give what has passed since the last change to the state it was in."""
        now = now_s()
        passed_s = now - (now if self._since_s is None else self._since_s)
        self._since_s = now
        if self._is_down:
            self._seconds["down"] += passed_s
        elif self._is_aside:
            self._seconds["evaluation"] += passed_s
        elif self._is_paused or self._is_blocked:
            self._seconds["paused"] += passed_s
        elif self._running:
            self._busy_s[self._running] += passed_s
        else:
            self._seconds["idle"] += passed_s
