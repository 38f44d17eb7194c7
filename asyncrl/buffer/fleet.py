"""Which version each engine is known to hold, and which engines count."""

from __future__ import annotations

import dataclasses
from collections import Counter

from asyncrl.buffer.view import EngineView
from asyncrl.errors import StalenessError


class Fleet:
    """Engines by name. A fenced engine counts again once it acknowledges the newest version any engine has acknowledged.

    Whoever fences an engine stops its requests first: a token it sampled while fenced could be older than the bound allows.
    """

    def __init__(self, *, version: int) -> None:
        self._engines: dict[str, EngineView] = {}
        self._newest = version
        self._served_version = version
        self._serving: Counter[int] = Counter()
        """Serving engines by version: the least is asked for with every acknowledgement, of thousands of engines in a simulation."""

    @property
    def served_version(self) -> int:
        """Newest version every serving engine is known to hold; stays where it was while none serves."""
        return self._served_version

    @property
    def engines(self) -> tuple[EngineView, ...]:
        """All engines, in the order they were added."""
        return tuple(self._engines.values())

    def add(self, name: str, version: int, *, trainer_version: int) -> None:
        """A new engine, or a fenced one that was started again. It serves at once if it holds the newest version."""
        known = self._engines.get(name)
        if known and known.serving:
            raise StalenessError(f"engine {name!r} already serves version {known.version}; fence it before it is added again")
        self._put(EngineView(name, version, serving=False))
        self.acknowledge(name, version, trainer_version=trainer_version)

    def acknowledge(self, name: str, version: int, *, trainer_version: int) -> None:
        """The engine holds `version`. Raises StalenessError when that is older than what it held, or not trained yet."""
        engine = self._engines.get(name)
        if engine is None:
            raise StalenessError(f"engine {name!r} acknowledged version {version} but was never added; known are {sorted(self._engines)}")
        if version < engine.version:
            raise StalenessError(f"engine {name!r} acknowledged version {version} after {engine.version}; versions only increase")
        if version > trainer_version:
            raise StalenessError(f"engine {name!r} acknowledged version {version}; the trainer is at {trainer_version}")
        self._newest = max(self._newest, version)
        self._put(EngineView(name, version, serving=engine.serving or version >= self._newest))

    def fence(self, name: str) -> None:
        """The engine gets no request and holds no slot back until it has the newest version again."""
        if name not in self._engines:
            raise StalenessError(f"engine {name!r} cannot be fenced, it was never added; known are {sorted(self._engines)}")
        self._put(dataclasses.replace(self._engines[name], serving=False))

    def _put(self, engine: EngineView) -> None:
        """Never lowers the served version: an engine begins to serve with the newest of all."""
        before = self._engines.get(engine.name)
        if before and before.serving:
            self._serving[before.version] -= 1
        if engine.serving:
            self._serving[engine.version] += 1
        self._engines[engine.name] = engine
        self._serving = +self._serving
        self._served_version = min(self._serving, default=self._served_version)
