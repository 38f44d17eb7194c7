"""The ends of the transport that a run's settings name: one for each trainer rank, each engine, and the controller. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from asyncrl.paths import RunPaths
from asyncrl.weights.config import NcclConfig, StoreConfig, Transport
from asyncrl.weights.push_log import PushLog
from asyncrl.weights.store import StoreTransport, open_store, unusable
from asyncrl.weights.transport import PartSink, PartSource, VersionLog


@dataclass(frozen=True, slots=True)
class TransportSpec:
    """What any end is made from. The controller has it from the run; children get its wire form."""

    folder: Path
    """The run's own, in this machine's shared memory."""
    run: str = "run"
    """Its name; keeps runs apart that share a root."""
    config: Transport = field(default_factory=StoreConfig)
    engine: str = ""
    """Whose end is to be made, if an engine's."""

    @classmethod
    def of(cls, paths: RunPaths, *, engine: str = "") -> TransportSpec:
        """That of a run, for one of its engines or anybody else."""
        return cls(folder=paths.weights.absolute(), run=paths.root.name, config=_CONFIG.validate_python(paths.transport), engine=engine)

    @property
    def is_pushed(self) -> bool:
        """Whether ranks have to deliver what engines fetch."""
        return isinstance(self.config, NcclConfig)

    def to_wire(self) -> dict[str, Any]:
        """A form JSON and msgpack can carry; `from_wire` gives the spec back."""
        return {"folder": str(self.folder), "run": self.run, "config": self.config.model_dump(), "engine": self.engine}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> TransportSpec:
        """The spec `to_wire` described."""
        return cls(folder=Path(wire["folder"]), run=wire["run"], config=_CONFIG.validate_python(wire["config"]),
                   engine=wire["engine"])


def sink_of(spec: TransportSpec, *, rank: int = 0, ranks: int = 1, device: str = "cpu") -> PartSink:
    """A rank's end; that of rank 0 comes up before any engine asks for a version.

    Args:
        device: that the rank's weights are on; parts may pass through its memory.
    """
    if not isinstance(spec.config, NcclConfig):
        return _store(spec, spec.config)
    from asyncrl.weights.broadcast import BroadcastSink

    return BroadcastSink(spec.folder, rank=rank, ranks=ranks, device=device, timeout_s=spec.config.timeout_s)


def source_of(spec: TransportSpec, *, worker: int = 0, workers: int = 1, device: str = "cpu") -> PartSource:
    """The end of one worker of `spec.engine`, which has as many as it has tensor-parallel ranks."""
    if not isinstance(spec.config, NcclConfig):
        return _store(spec, spec.config)
    from asyncrl.weights.broadcast import BroadcastSource

    return BroadcastSource(spec.folder, engine=spec.engine, worker=worker, workers=workers, device=device, timeout_s=spec.config.timeout_s)


def log_of(spec: TransportSpec) -> VersionLog:
    """The controller's end. Raises ConfigError where versions cannot be written."""
    if isinstance(spec.config, NcclConfig):
        return PushLog()
    store = _store(spec, spec.config)
    try:
        store.prove_writable()
    except OSError as error:
        raise unusable(spec.config, error) from error
    return store


def _store(spec: TransportSpec, config: StoreConfig) -> StoreTransport:
    return open_store(config, folder=spec.folder, run=spec.run)


_CONFIG: TypeAdapter[Transport] = TypeAdapter(Transport)
