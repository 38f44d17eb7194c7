"""The child of `TransformersEngine`: a model, its sampler and a weight receiver behind the protocol of `child_engine`."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from asyncrl.channel import CANCEL, CLOSE, Channel, ParentGone, Request
from asyncrl.errors import EngineError, WeightSyncError
from asyncrl.lora_config import LoRA
from asyncrl.process import peak_memory_bytes, release_free_memory, resident_bytes
from asyncrl.records import Wanted
from asyncrl.rollout.chunk_stream import ChunkStream, Emission
from asyncrl.rollout.engine import Interruption
from asyncrl.rollout.loaded_model import load_model, model_routing
from asyncrl.rollout.released_weights import ReleasableWeights
from asyncrl.rollout.transformers_sampler import Job, Limits, Sampler
from asyncrl.types import NOT_SAMPLED
from asyncrl.weights.ends import TransportSpec, source_of
from asyncrl.weights.manifest import Manifest
from asyncrl.weights.receiver import Receiver


def serve(channel: Channel, spec: Mapping[str, Any]) -> None:
    """Serve one engine until the controller closes it. `spec` is made by `TransformersEngine`."""
    torch.set_num_threads(spec["threads"])
    child = _Child(channel, spec)
    threading.Thread(target=child.exit_when_stopped, daemon=True).start()
    channel.ready()
    try:
        with contextlib.suppress(ParentGone):
            while (request := channel.recv()).op != CLOSE:
                if request.op != CANCEL:
                    child.handle(request)
    finally:
        child.sampler.close()


class _Child:
    """Handles requests one after another on the serving thread; chunks leave from it and from the generation thread."""

    def __init__(self, channel: Channel, spec: Mapping[str, Any]) -> None:
        self._channel, self._stream = channel, ChunkStream(channel)
        model = load_model(Path(spec["folder"]), dtype=spec["dtype"], lora=spec["lora"] and LoRA.model_validate(spec["lora"]))
        routing = model_routing(model) if spec["has_experts"] else None
        self._weights = ReleasableWeights(model)
        self._receiver = Receiver(self._weights.targets(), source=source_of(TransportSpec.from_wire(spec["transport"]),
                                                                            device=str(model.device)))
        self._receiving = threading.Lock()
        self._asleep = False
        self._paused_at_s = time.monotonic()
        self.sampler = Sampler(model, eos_tokens=spec["eos_tokens"], limits=Limits(**spec["limits"]), seed=spec["seed"], emit=self._emit,
                               routing=routing)
        self._handlers: dict[str, Callable[[Request], Mapping[str, Any]]] = {
            "requests": self._requests, "hold": self._hold, "pause": self._pause, "apply": self._apply, "resume": self._resume,
            "sleep": self._sleep, "wake": self._wake, "health": self._health}

    def handle(self, request: Request) -> None:
        """Answer one request; an error is the answer to the request that caused it."""
        if request.op == "chunks":
            self._stream.opened(request.id)
            return
        if request.op == "fetch":  # beside everything else: sampling, and the requests that come meanwhile
            threading.Thread(target=self._fetch, args=(request,), name="fetch", daemon=True).start()
            return
        try:
            self._channel.reply(request.id, self._handlers[request.op](request))
        except ParentGone:
            raise
        except Exception as error:
            self._channel.fail(request.id, error)

    def exit_when_stopped(self) -> None:
        """End the process when generation has failed: an engine that cannot sample is gone."""
        if not self.sampler.wait_until_stopped():
            os._exit(1)

    def _requests(self, request: Request) -> Mapping[str, Any]:
        tokens = request.arrays["tokens"].tolist()
        jobs, start = [], 0
        for key, length, budget, temperature, _, truncation, wanted in request.body["new"]:
            jobs.append(Job(key, tokens[start:start + length], budget, temperature, tuple(truncation), Wanted(*wanted)))
            start += length
        self.sampler.submit(jobs)
        self.sampler.cancel(request.body["cancelled"])
        return {}

    def _hold(self, request: Request) -> Mapping[str, Any]:
        return {"running": self.sampler.hold()}

    def _pause(self, request: Request) -> Mapping[str, Any]:
        self._paused_at_s = time.monotonic()
        self.sampler.pause(Interruption(request.body["kind"]))
        return {"messages": self._stream.messages}

    def _fetch(self, request: Request) -> None:
        try:
            with self._receiving:
                if self._asleep:
                    raise WeightSyncError("the engine is asleep: it has no memory for weights before it wakes")
                self._receiver.fetch(Manifest.from_json(request.body["manifest"]))
            self._channel.reply(request.id)
        except ParentGone:
            return  # the serving thread ends the process
        except Exception as error:
            self._channel.fail(request.id, error)

    def _apply(self, request: Request) -> Mapping[str, Any]:
        if not self.sampler.paused:
            raise WeightSyncError("weights are applied only between pause and resume")
        if self._asleep:
            raise WeightSyncError("the engine is asleep: it has no memory for weights before it wakes")
        self.sampler.check_parked()
        with self._receiving:
            before = self._receiver.state_hash
            state_hash = self._receiver.apply(Manifest.from_json(request.body["manifest"]))
        if state_hash != before:
            self.sampler.mark_stale()
        return {"state_hash": state_hash, "pause_s": time.monotonic() - self._paused_at_s,
                "recomputed_tokens": self.sampler.interrupted_tokens}

    def _resume(self, request: Request) -> Mapping[str, Any]:
        if self._receiver.version is None:
            raise WeightSyncError(f"no version is held to sample from: {self._receiver.poisoned or 'none has been applied'}")
        self.sampler.resume()
        return {}

    def _sleep(self, request: Request) -> Mapping[str, Any]:
        if self._asleep:
            raise EngineError("the engine is asleep already")
        before_bytes = resident_bytes()
        freed_bytes = self.sampler.release_cache()
        with self._receiving:
            self._asleep = True
            self._receiver.release("its memory was given back")
            freed_bytes += self._weights.release()
        release_free_memory()
        return {"freed_bytes": freed_bytes, "resident_bytes_before": before_bytes, "resident_bytes": resident_bytes()}

    def _wake(self, request: Request) -> Mapping[str, Any]:
        if not self._asleep:
            raise EngineError("the engine is not asleep")
        self.sampler.restore_cache()
        self._weights.restore()
        self._receiver.rebind(self._weights.targets())
        self._asleep = False
        return {}

    def _health(self, request: Request) -> Mapping[str, Any]:
        version = self._receiver.version
        return {"version": NOT_SAMPLED if version is None else version, "running_requests": self.sampler.running_requests,
                "peak_memory_bytes": peak_memory_bytes()}

    def _emit(self, emissions: list[Emission]) -> None:
        self._stream.send(emissions, version=self._receiver.version, passes=lambda: self.sampler.take_passes_s())
