"""The ends of the transport that a run's settings name: one for each trainer rank, each engine, and the controller. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from asyncrl.paths import RunPaths
from asyncrl.weights.config import StoreConfig, Transport
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

    @classmethod
    def of(cls, paths: RunPaths) -> TransportSpec:
        """That of a run."""
        return cls(folder=paths.weights.absolute(), run=paths.root.name, config=_CONFIG.validate_python(paths.transport))

    def to_wire(self) -> dict[str, Any]:
        """A form JSON and msgpack can carry; `from_wire` gives the spec back."""
        return {"folder": str(self.folder), "run": self.run, "config": self.config.model_dump()}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> TransportSpec:
        """The spec `to_wire` described."""
        return cls(folder=Path(wire["folder"]), run=wire["run"], config=_CONFIG.validate_python(wire["config"]))


def sink_of(spec: TransportSpec) -> PartSink:
    """A rank's end."""
    return _store(spec)


def source_of(spec: TransportSpec) -> PartSource:
    """An engine's end; each of its ranks has one."""
    return _store(spec)


def log_of(spec: TransportSpec) -> VersionLog:
    """The controller's end. Raises ConfigError where versions cannot be written."""
    store = _store(spec)
    try:
        store.prove_writable()
    except OSError as error:
        raise unusable(spec.config, error) from error
    return store


def _store(spec: TransportSpec) -> StoreTransport:
    return open_store(spec.config, folder=spec.folder, run=spec.run)


_CONFIG: TypeAdapter[Transport] = TypeAdapter(Transport)
