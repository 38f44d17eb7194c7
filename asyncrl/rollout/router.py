"""Which engine serves which request, and the weight update as one transaction over all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from collections.abc import Sequence as SequenceOf
from contextlib import aclosing
from dataclasses import dataclass

from asyncrl.clock import now_s
from asyncrl.errors import AsyncRLError, ChildDied, ConfigError, RunAborted, WeightSyncError
from asyncrl.rollout.engine import Ack, Chunk, Engine, GenerationRequest, Interruption, Slept
from asyncrl.weights.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Update:
    """What became of one weight update."""

    acks: dict[str, Ack]
    """By engine; each holds the new version."""
    failed: dict[str, str]
    """Engine → why it was fenced, in this update or since the one before."""
    seconds: float
    """From the first pause to the last resume."""
    woken: bool = False
    """Engines were asleep, and have taken their memory again."""


class Router:
    """Sends each request to the least loaded serving engine, and fences an engine that fails an update.

    An engine serves nothing until it has acknowledged its first version.
    """

    def __init__(self, engines: SequenceOf[Engine], *, drain_timeout_s: float = 600.0, apply_timeout_s: float = 120.0) -> None:
        names = [engine.name for engine in engines]
        if not names or len(set(names)) != len(names):
            raise ConfigError("engine.name", value=names, allowed="at least one engine, each with a name of its own",
                              remedy="Name the engines apart.")
        self._engines = {engine.name: engine for engine in engines}
        self._running = dict.fromkeys(names, 0)
        self._serving: set[str] = set()
        self._asleep: set[str] = set()
        self.drain_timeout_s, self.apply_timeout_s = drain_timeout_s, apply_timeout_s
        self._why_fenced: dict[str, str] = {}
        self._reported: set[str] = set()
        self._busy_s = 0.0
        self._busy_since_s: float | None = None

    @property
    def context_tokens(self) -> int:
        """The smallest context of all engines."""
        return min(engine.capabilities.context_tokens for engine in self._engines.values())

    @property
    def serving(self) -> tuple[str, ...]:
        """Engines that may receive requests."""
        return tuple(sorted(self._serving))

    @property
    def unfenced(self) -> tuple[str, ...]:
        """Engines that take part in the next update."""
        return tuple(name for name in self._engines if name not in self._why_fenced)

    @property
    def running(self) -> int:
        """Requests that are with an engine now."""
        return sum(self._running.values())

    def busy_s(self) -> float:
        """Seconds so far in which at least one request was with an engine."""
        return self._busy_s + (now_s() - self._busy_since_s if self._busy_since_s is not None else 0.0)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """The chunks of `request`. Raises RunAborted when no engine serves, ChildDied when its engine dies."""
        name = self._least_loaded()
        self._enter(name)
        try:
            async with aclosing(self._engines[name].generate(request)) as stream:  # type: ignore[type-var]
                async for chunk in stream:
                    yield chunk
        except ChildDied as error:
            self._fence(name, str(error))
            raise
        finally:
            self._leave(name)

    async def update(self, manifest: Manifest, interruption: Interruption) -> Update:
        """Pause, apply, verify, resume on every engine at once; an engine that fails is fenced and closed, the others go on.

        One that is asleep, and stands still already, wakes instead of pausing; it takes an anchor alone. Requests of a closed engine
        end with ChildDied and move. Raises RunAborted when no engine is left.
        """
        began_s = now_s()
        names = self.unfenced
        woken = bool(self._asleep)
        results = await asyncio.gather(*(self._update_one(self._engines[name], manifest, interruption) for name in names))
        self._asleep.clear()
        for name, result in zip(names, results, strict=True):
            if isinstance(result, str):
                self._fence(name, result)
        acks = {name: result for name, result in zip(names, results, strict=True) if name not in self._why_fenced}
        failed = {name: reason for name, reason in self._why_fenced.items() if name not in self._reported}
        self._serving |= set(acks)
        self._reported |= set(failed)
        if not acks:
            raise RunAborted(f"version {manifest.version} reached no engine: {self._why_fenced}")
        for name in failed:
            await self._engines[name].close()
        return Update(acks, failed, now_s() - began_s, woken)

    async def sleep(self) -> dict[str, Slept]:
        """Have every engine end what it runs and give its memory back until the next update; by engine, what it gave.

        One that fails is fenced and closed, the others sleep. Raises RunAborted when no engine is left.
        """
        names = sorted(self._serving)
        results = await asyncio.gather(*(self._sleep_one(self._engines[name]) for name in names))
        slept = {name: result for name, result in zip(names, results, strict=True) if isinstance(result, Slept)}
        self._asleep |= set(slept)
        for name, result in zip(names, results, strict=True):
            if isinstance(result, str):
                self._fence(name, result)
                await self._engines[name].close()
        if not slept:
            raise RunAborted(f"no engine serves: {self._why_fenced}")
        return slept

    async def _sleep_one(self, engine: Engine) -> Slept | str:
        what, limit_s = "pause", self.drain_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await engine.pause(Interruption.DRAIN)
            what, limit_s = "sleep", self.apply_timeout_s
            async with asyncio.timeout(limit_s):
                return await engine.sleep()
        except AsyncRLError as error:
            return f"{type(error).__name__}: {error}"
        except TimeoutError:
            return f"{what} did not return within {limit_s:g} s"

    async def _update_one(self, engine: Engine, manifest: Manifest, interruption: Interruption) -> Ack | str:
        what, limit_s = "pause", self.drain_timeout_s if interruption is Interruption.DRAIN else self.apply_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await (engine.wake() if engine.name in self._asleep else engine.pause(interruption))
            what, limit_s = "apply and resume", self.apply_timeout_s
            async with asyncio.timeout(limit_s):
                ack = await engine.apply(manifest)
                if (ack.version, ack.state_hash) != (manifest.version, manifest.state_hash):
                    raise WeightSyncError(f"{engine.name} acknowledged version {ack.version} with state hash {ack.state_hash:#x}, "
                                          f"published: version {manifest.version}, {manifest.state_hash:#x}")
                await engine.resume()
            return ack
        except AsyncRLError as error:
            return f"{type(error).__name__}: {error}"
        except TimeoutError:
            return f"{what} did not return within {limit_s:g} s"

    def _least_loaded(self) -> str:
        if not self._serving:
            raise RunAborted(f"no engine serves: {self._why_fenced or 'none has acknowledged a version'}")
        return min(sorted(self._serving), key=self._running.__getitem__)

    def _fence(self, name: str, reason: str) -> None:
        self._serving.discard(name)
        self._why_fenced.setdefault(name, reason)

    def _enter(self, name: str) -> None:
        if self.running == 0:
            self._busy_since_s = now_s()
        self._running[name] += 1

    def _leave(self, name: str) -> None:
        self._running[name] -= 1
        if self.running == 0 and self._busy_since_s is not None:
            self._busy_s, self._busy_since_s = self._busy_s + now_s() - self._busy_since_s, None
