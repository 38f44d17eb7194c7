"""Which engine serves which request, and the weight update as one transaction over all of them.

    fetch    pull and verify      beside sampling     weights.fetch_timeout_s
    pause    nothing is sampled                       weights.apply_timeout_s, drain_timeout_s where it drains
    apply    write, verify        in the pause        weights.apply_timeout_s
    resume   sample again                             weights.apply_timeout_s

Whatever fails at a step fences that engine: its requests move, it gets no other, and it is brought back by the same steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from asyncrl.clock import now_s
from asyncrl.errors import AbortNotHonoured, AsyncRLError, ChildDied, ConfigError, EngineError, RunAborted, WeightSyncError
from asyncrl.paths import RunPaths
from asyncrl.rollout.engine import Ack, Chunk, Engine, GenerationRequest, Interruption, Slept
from asyncrl.weights.config import WeightsConfig
from asyncrl.weights.manifest import Manifest

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Update:
    """What became of one weight update."""

    acks: dict[str, Ack]
    """By engine; each holds the new version."""
    failed: dict[str, str]
    """Engine → why this update fenced it."""
    seconds: float
    """From the first pause to the last resume."""
    woken: bool = False
    """Engines were asleep, and have taken their memory again."""


@dataclass(slots=True, eq=False)
class _Place:
    """What is known of one engine."""

    engine: Engine
    requests: set[asyncio.Future[None]] = field(default_factory=set)
    """One for each request it runs; done when the request has to move."""
    is_serving: bool = False
    is_asleep: bool = False
    held: Manifest | None = None
    """What it acknowledged last."""
    why_fenced: str = ""
    answers: bool = True
    """Fenced, its process can be asked again; else it died, hung, or was no help."""
    is_given_up: bool = False


class Router:
    """Sends each request to the least loaded serving engine, and fences an engine that fails.

    An engine serves nothing until it has acknowledged the newest version. While none serves requests wait, as long as somebody brings
    fenced engines back (`next_fenced`).
    """

    def __init__(self, engines: SequenceOf[Engine], *, config: WeightsConfig | None = None) -> None:
        names = [engine.name for engine in engines]
        if not names or len(set(names)) != len(names):
            raise ConfigError("engine.name", value=names, allowed="at least one engine, each with a name of its own",
                              remedy="Name the engines apart.")
        self._places = {engine.name: _Place(engine) for engine in engines}
        self.config = config or WeightsConfig()
        self.newest: Manifest | None = None
        """The version that engines are brought to."""
        self._fenced: asyncio.Queue[str] = asyncio.Queue()
        self._is_healed = self._is_resting = False
        self._attempts = 0
        self._change = asyncio.Event()
        self._busy_s = 0.0
        self._busy_since_s: float | None = None

    @property
    def context_tokens(self) -> int:
        """The smallest context of all engines."""
        return min(place.engine.capabilities.context_tokens for place in self._places.values())

    @property
    def serving(self) -> tuple[str, ...]:
        """Engines that may receive requests."""
        return tuple(sorted(name for name, place in self._places.items() if place.is_serving))

    @property
    def unfenced(self) -> tuple[str, ...]:
        """Engines that take part in the next update."""
        return tuple(name for name, place in self._places.items() if not place.why_fenced)

    @property
    def has_hope(self) -> bool:
        """Whether an engine serves, or one may come back."""
        return any(place.is_serving or (self._is_healed and not place.is_given_up) for place in self._places.values())

    @property
    def running(self) -> int:
        """Requests that are with an engine now."""
        return sum(len(place.requests) for place in self._places.values())

    @property
    def reasons(self) -> dict[str, str]:
        """Why engines are fenced, by name."""
        return {name: place.why_fenced for name, place in self._places.items() if place.why_fenced}

    @property
    def slowest(self) -> int | None:
        """Version, of the newest run epoch, from which an engine may still want to go on; None while none has one."""
        held = [place.held for place in self._places.values() if place.answers and not place.is_given_up]
        return min((one.version for one in held if one and self.newest and one.run_epoch == self.newest.run_epoch), default=None)

    def busy_s(self) -> float:
        """Seconds so far in which at least one request was with an engine."""
        return self._busy_s + (now_s() - self._busy_since_s if self._busy_since_s is not None else 0.0)

    def holds(self, version: int) -> bool:
        """Whether engines serve, and all that do have this version."""
        held = [place.held for place in self._places.values() if place.is_serving]
        return bool(held) and all(one is not None and one.version >= version for one in held)

    def require_hope(self) -> None:
        """Raise RunAborted, with every reason, when no engine serves and none can come back."""
        if not self.has_hope:
            raise RunAborted(f"no engine serves: {self.reasons or 'none has acknowledged a version'}")

    async def until(self, predicate: Callable[[], bool]) -> None:
        """Waits for: a change of engines after which `predicate` holds."""
        while not predicate():
            await self._change.wait()

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """The chunks of `request`. Waits while no engine serves and one may come back.

        Raises RunAborted when none can, ChildDied when its engine dies or is fenced.
        """
        await self.until(lambda: bool(self.serving) or not self.has_hope)
        place = self._least_loaded()
        moves = self._enter(place)
        try:
            async with aclosing(place.engine.generate(request)) as stream:  # type: ignore[type-var]
                while (chunk := await _next_unless(moves, stream)) is not None:
                    yield chunk
            if moves.done():
                raise ChildDied(f"engine {place.engine.name} was fenced: {place.why_fenced}")
        except ChildDied as error:
            self._fence(place, error)
            raise
        finally:
            self._leave(place, moves)

    async def fetch(self, manifest: Manifest) -> dict[str, float]:
        """Have every engine pull and verify a version while it samples; seconds by engine that has it. One that fails is fenced.

        One that is asleep has no memory to compare with: it fetches when it applies.
        """
        self.newest = manifest
        places = [place for place in self._taking(manifest) if not place.is_asleep]
        results = await asyncio.gather(*(self._fetch_one(place, manifest) for place in places))
        return {place.engine.name: seconds for place, seconds in zip(places, results, strict=True) if seconds is not None}

    async def update(self, manifest: Manifest, interruption: Interruption) -> Update:
        """Pause, apply, verify, resume on every engine at once; an engine that fails is fenced, the others go on.

        One that is asleep, and stands still already, wakes instead of pausing; it takes an anchor alone. Raises RunAborted when no engine
        serves and none can come back.
        """
        began_s = now_s()
        self.newest, self._is_resting = manifest, False
        places = list(self._taking(manifest))
        woken = any(place.is_asleep for place in places)
        results = await asyncio.gather(*(self._update_one(place, manifest, interruption) for place in places))
        acks, failed = {}, {}
        for place, ack in zip(places, results, strict=True):
            if ack is None or place.why_fenced:
                failed[place.engine.name] = place.why_fenced
            else:
                acks[place.engine.name] = ack
                place.is_serving = True
        self._changed()
        self.require_hope()
        return Update(acks, failed, now_s() - began_s, woken)

    async def sleep(self) -> dict[str, Slept]:
        """Have every engine end what it runs and give its memory back until the next update; by engine, what it gave.

        One that fails is fenced, the others sleep. Waits for engines that are being brought back. Raises RunAborted when no engine is
        left.
        """
        self._is_resting = True
        await self.until(lambda: self._attempts == 0)
        places = [self._places[name] for name in self.serving]
        results = await asyncio.gather(*(self._sleep_one(place) for place in places))
        self.require_hope()
        return {place.engine.name: slept for place, slept in zip(places, results, strict=True) if slept is not None}

    def add(self, engine: Engine) -> None:
        """An engine that was started, and comes late: it is brought to the newest version like one that was fenced."""
        if engine.name in self._places:
            raise ConfigError("engine.name", value=engine.name, allowed=f"none of {sorted(self._places)}", remedy="Name the engines apart.")
        self._places[engine.name] = _Place(engine, why_fenced="it comes late, and has acknowledged no version yet")
        self._fenced.put_nowait(engine.name)

    async def next_fenced(self) -> str:
        """An engine to be brought back. Waits for: one that is fenced, or comes late. From the first call on there is hope."""
        self._is_healed = True
        return await self._fenced.get()

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Engines do not fall asleep meanwhile."""
        self._attempts += 1
        try:
            yield
        finally:
            self._attempts -= 1
            self._changed()

    @property
    def is_resting(self) -> bool:
        """Engines sleep: others need the memory."""
        return self._is_resting

    def answers(self, name: str) -> bool:
        """Whether a fenced engine can be asked again, as it is."""
        return self._places[name].answers

    def is_given_up(self, name: str) -> bool:
        """Whether an engine is closed for good."""
        return self._places[name].is_given_up

    async def start_anew(self, name: str, paths: RunPaths) -> None:
        """End an engine, whatever it hangs in, and start it. Raises what `Engine.start` does."""
        place = self._places[name]
        place.held, place.is_asleep = None, False
        await place.engine.close()
        await place.engine.start(paths)
        place.answers = True

    async def bring_to(self, name: str, manifest: Manifest, interruption: Interruption) -> Ack:
        """All steps on one engine that is fenced. Raises AsyncRLError."""
        place = self._places[name]
        if not place.is_asleep:
            await self._within(self.config.fetch_timeout_s, "fetch", place.engine.fetch(manifest))
        return await self._transact(place, manifest, interruption)

    def join(self, name: str, manifest: Manifest) -> bool:
        """A fenced engine that has acknowledged `manifest` serves again; False, and it does not, when there is a newer version."""
        if self.newest is not None and _age(manifest) < _age(self.newest):
            return False
        place = self._places[name]
        place.why_fenced, place.is_serving = "", True
        self._changed()
        return True

    def not_brought_back(self, name: str, error: Exception) -> None:
        """What was tried has failed: only a new process can help."""
        place = self._places[name]
        place.answers = False
        place.why_fenced = f"{place.why_fenced}; then {_text(error)}"

    async def give_up(self, name: str) -> None:
        """End an engine for good. Raises RunAborted when no other can serve."""
        self._places[name].is_given_up = True
        self._changed()
        await self._places[name].engine.close()
        self.require_hope()

    def _taking(self, manifest: Manifest) -> Iterator[_Place]:
        """Engines that are to have this version, and do not."""
        for place in self._places.values():
            if not place.why_fenced and (place.is_asleep or place.held is None or _age(place.held) < _age(manifest)):
                yield place

    async def _fetch_one(self, place: _Place, manifest: Manifest) -> float | None:
        began_s = now_s()
        try:
            await self._within(self.config.fetch_timeout_s, "fetch", place.engine.fetch(manifest))
        except AsyncRLError as error:
            return self._fence(place, error)
        return now_s() - began_s

    async def _update_one(self, place: _Place, manifest: Manifest, interruption: Interruption) -> Ack | None:
        try:
            return await self._transact(place, manifest, interruption)
        except AsyncRLError as error:
            return self._fence(place, error)

    async def _transact(self, place: _Place, manifest: Manifest, interruption: Interruption) -> Ack:
        """Pause or wake, apply, verify, resume."""
        engine, apply_s = place.engine, self.config.apply_timeout_s
        if place.is_asleep:
            await self._within(apply_s, "wake", engine.wake())
            place.is_asleep = False
        else:
            pause_s = self.config.drain_timeout_s if interruption is Interruption.DRAIN else apply_s
            await self._within(pause_s, "pause", engine.pause(interruption))
        ack = await self._within(apply_s, "apply", engine.apply(manifest))
        if (ack.version, ack.state_hash) != (manifest.version, manifest.state_hash):
            raise WeightSyncError(f"{engine.name} acknowledged version {ack.version} with state hash {ack.state_hash:#x}, "
                                  f"published: version {manifest.version}, {manifest.state_hash:#x}")
        await self._within(apply_s, "resume", engine.resume())
        place.held = manifest
        return ack

    async def _sleep_one(self, place: _Place) -> Slept | None:
        try:
            await self._within(self.config.drain_timeout_s, "pause", place.engine.pause(Interruption.DRAIN))
            slept = await self._within(self.config.apply_timeout_s, "sleep", place.engine.sleep())
        except AsyncRLError as error:
            return self._fence(place, error)
        place.is_asleep, place.held = True, None
        return slept

    @staticmethod
    async def _within(limit_s: float, what: str, work: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(limit_s):
                return await work
        except AsyncRLError:
            raise
        except TimeoutError:
            raise _Hung(f"{what} did not return within {limit_s:g} s") from None

    def _least_loaded(self) -> _Place:
        self.require_hope()
        return min((self._places[name] for name in self.serving), key=lambda place: len(place.requests))

    def _fence(self, place: _Place, error: AsyncRLError) -> None:
        if place.why_fenced:
            return
        place.is_serving, place.why_fenced = False, _text(error)
        place.answers = not isinstance(error, ChildDied | AbortNotHonoured | _Hung)
        for moves in place.requests:
            if not moves.done():
                moves.set_result(None)
        self._fenced.put_nowait(place.engine.name)
        self._changed()

    def _enter(self, place: _Place) -> asyncio.Future[None]:
        if self.running == 0:
            self._busy_since_s = now_s()
        moves: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place.requests.add(moves)
        return moves

    def _leave(self, place: _Place, moves: asyncio.Future[None]) -> None:
        place.requests.discard(moves)
        if self.running == 0 and self._busy_since_s is not None:
            self._busy_s, self._busy_since_s = self._busy_s + now_s() - self._busy_since_s, None

    def _changed(self) -> None:
        """Wake whoever waits."""
        self._change.set()
        self._change = asyncio.Event()


class _Hung(EngineError):
    """A step did not end in time."""


async def _next_unless(moves: asyncio.Future[None], stream: AsyncIterator[Chunk]) -> Chunk | None:
    """The next chunk; None at the end, and when the request has to move."""
    if moves.done():
        return None
    chunk = asyncio.create_task(_next(stream))
    try:
        await asyncio.wait({chunk, moves}, return_when=asyncio.FIRST_COMPLETED)
        return chunk.result() if chunk.done() else None
    finally:
        if not chunk.done():
            chunk.cancel()
            await asyncio.gather(chunk, return_exceptions=True)


async def _next(stream: AsyncIterator[Chunk]) -> Chunk | None:
    return await anext(stream, None)


def _age(manifest: Manifest) -> tuple[int, int]:
    return manifest.run_epoch, manifest.version


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, _Hung) or type(error) is ChildDied else f"{type(error).__name__}: {error}"
