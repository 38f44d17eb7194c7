"""What the settings of the ways that weights take do."""

from __future__ import annotations

import dataclasses
from itertools import count
from types import SimpleNamespace

import pytest

from asyncrl.config import RunConfig
from asyncrl.errors import WeightSyncError
from asyncrl.weights import meeting
from asyncrl.weights.ends import TransportSpec, log_of, sink_of
from asyncrl.weights.manifest import Manifest
from tests.config_observers import Scene


def pushed(config: RunConfig, scene: Scene) -> object:
    """How long rank 0 waits, by a clock that runs fast, for an engine that does not come."""
    ticks = count(step=5)
    scene.patch.setattr(meeting, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    spec = TransportSpec.of(dataclasses.replace(scene.paths, transport=config.weights.transport.model_dump()))
    sink = sink_of(spec)
    with pytest.raises(WeightSyncError) as missing, meeting.be_alive(spec.folder, "engine-0.0"):
        sink.deliver(Manifest(run_epoch=0, version=0, base=None, parts=(), tensors=(), state_hash=0), engines=["engine-0"])
    return [str(missing.value)]


def stored(config: RunConfig, scene: Scene) -> object:
    """Files in the run's folders, and their bytes, after three versions of which engines hold the last."""
    spec = TransportSpec.of(dataclasses.replace(scene.paths, transport=config.weights.transport.model_dump()))
    sink, log = sink_of(spec), log_of(spec)
    for version in range(3):
        part = sink.put_part(version, rank=0, bucket=0, chunks=[bytes(1000)])
        log.commit(Manifest(run_epoch=0, version=version, base=version - 1 if version else None, parts=(part,), tensors=(), state_hash=1))
    log.retain(2)
    return [(path.name, path.stat().st_size) for path in sorted(scene.folder.rglob("v0*/*"))]
