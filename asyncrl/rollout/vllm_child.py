"""The child of `VLLMEngine`: vLLM's AsyncLLM behind the protocol of `child_engine`, on one asyncio loop.

Requests run to their end inside vLLM; what they have written is read when they end and at each pause, and stamped with the version
that wrote it. At the end of a request the stamps are compared with vLLM's own record. A request that has not sampled anything at an
update starts again under the new version, so that no key of an older one stays unnoticed. A version's label salts the prefix cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.logprobs import FlatLogprobs
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from asyncrl.channel import CANCEL, CLOSE, Channel, ParentGone, Request
from asyncrl.errors import ConfigError, EngineError, WeightSyncError
from asyncrl.process import peak_memory_bytes
from asyncrl.rollout.chunk_stream import ChunkStream, Emission
from asyncrl.rollout.engine import Interruption
from asyncrl.rollout.inbox import inbox_of
from asyncrl.rollout.vllm_adapters import ServedAdapters
from asyncrl.rollout.vllm_job import Job
from asyncrl.types import NOT_SAMPLED, Status
from asyncrl.weights.engine_ranks import EngineRanks
from asyncrl.weights.manifest import Manifest
from asyncrl.weights.vllm_plugin import EXTENSION

IN_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""On a CPU vLLM puts its worker into a process of its own, to pin threads, which this engine does not; the two then wait for each other by
spinning, on cores the trainer could use. By its full name the other executor is taken as it is."""
_QUIET_TICKS = 4
"""Turns of the loop without an output after which vLLM's output task, which yields once a turn while it has work, has none left."""


def serve(channel: Channel, spec: Mapping[str, Any]) -> None:
    """Serve one engine until the controller closes it. `spec` is made by `VLLMEngine`."""
    asyncio.run(_serve(channel, spec))


async def _serve(channel: Channel, spec: Mapping[str, Any]) -> None:
    engine = _start(spec)
    place = Path(spec["transport"]["folder"]).with_name(f"adapters-{os.getpid()}")
    child = _Child(channel, engine, eos_tokens=spec["eos_tokens"],
                   adapters=ServedAdapters(engine, make=LoRARequest, folder=place) if spec["lora"] else None)
    try:
        await child.prepare(folder=spec["folder"], transport=spec["transport"], lora=spec["lora"])
        inbox = inbox_of(channel)
        assert engine.output_handler is not None
        engine.output_handler.add_done_callback(lambda _: child.engine_died())
        channel.ready()
        with contextlib.suppress(ParentGone):
            while (request := await inbox.get()) is not None and request.op != CLOSE:
                if request.op != CANCEL:
                    await child.handle(request)
    finally:
        child.closing = True
        engine.shutdown(timeout=0)


def _start(spec: Mapping[str, Any]) -> AsyncLLM:
    """vLLM with nothing left to its defaults that could change what is sampled or how its logprobs are given."""
    on_cpu = current_platform.is_cpu()
    executor = {"distributed_executor_backend": IN_PROCESS} if on_cpu and spec["arguments"]["tensor_parallel_size"] == 1 else {}
    arguments = AsyncEngineArgs(
        model=spec["folder"], logprobs_mode="processed_logprobs", generation_config="vllm", enable_prefix_caching=True,
        enforce_eager=on_cpu, disable_log_stats=True, worker_extension_cls=EXTENSION, **executor, **spec["arguments"])
    config = arguments.create_engine_config()
    if on_cpu:
        _check_head_size(config.model_config.get_head_size())
    _check_cache(config)
    return AsyncLLM.from_vllm_config(config, disable_log_stats=True)


def _check_head_size(head_size: int) -> None:
    """Raise ConfigError for a model that vLLM's CPU attention would refuse at its first forward, long after the start."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    allowed = CPUAttentionBackend.get_supported_head_sizes()
    if head_size not in allowed:
        raise ConfigError("model", value=f"attention heads of size {head_size}", allowed=f"one of {allowed} with vLLM on a CPU",
                          remedy="Choose the transformers engine, or a model with other heads.")


def _check_cache(config: VllmConfig) -> None:
    """Raise ConfigError when one request of full length would not fit: vLLM's own refusal names settings that are not ours."""
    model, itemsize = config.model_config, config.model_config.dtype.itemsize
    if model.use_mla or model.is_hybrid:
        return  # their caches are smaller; vLLM judges those itself
    heads, layers = model.get_num_kv_heads(config.parallel_config), model.get_num_layers(config.parallel_config)
    needed = model.max_model_len * layers * 2 * heads * model.get_head_size() * itemsize
    given = config.cache_config.kv_cache_memory_bytes
    if needed > given:
        raise ConfigError("engine.kv_cache_bytes, engine.context_tokens", value=(given, model.max_model_len),
                          allowed=f"a cache that holds one request of full length, {needed} bytes for {model.max_model_len} tokens",
                          remedy="Raise kv_cache_bytes, or lower context_tokens to what prompts and completions need.")


class _Child:
    """Handles the controller's requests one after another."""

    def __init__(self, channel: Channel, engine: AsyncLLM, *, eos_tokens: list[int], adapters: ServedAdapters | None) -> None:
        self._channel, self._stream, self._engine, self._eos_tokens = channel, ChunkStream(channel), engine, eos_tokens
        self._adapters = adapters
        self._ranks = EngineRanks(self._ask)
        self._version: int | None = None
        self._label = ""
        self._why_no_version = "none has been applied"
        self._held = self._paused = True
        self._pause_kind = Interruption.DRAIN
        self._paused_at_s = time.monotonic()
        self._recomputed_tokens = 0
        self._waiting: dict[str, Job] = {}
        self._running: dict[str, Job] = {}
        self._emissions: list[Emission] = []
        self._fetches: set[asyncio.Task[None]] = set()
        self.closing = False
        self._handlers: dict[str, Callable[[Request], Awaitable[Mapping[str, Any]]]] = {
            "requests": self._requests, "hold": self._hold, "pause": self._pause, "fetch": self._fetch, "apply": self._apply,
            "resume": self._resume, "health": self._health}

    async def prepare(self, *, folder: str, transport: Mapping[str, Any], lora: Mapping[str, Any] | None) -> None:
        """Record where weights land, prove it, and pause."""
        await self._ranks.prepare(folder, transport=transport, lora=lora)
        await self._engine.pause_generation(mode="keep", clear_cache=False)

    async def handle(self, request: Request) -> None:
        """Answer one request; an error is the answer to the request that caused it."""
        if request.op == "chunks":
            self._stream.opened(request.id)
        elif request.op == "fetch":  # requests go on beside it
            task = asyncio.create_task(self._answer(request))
            self._fetches.add(task)
            task.add_done_callback(self._fetches.discard)
        else:
            await self._answer(request)

    async def _answer(self, request: Request) -> None:
        try:
            self._channel.reply(request.id, await self._handlers[request.op](request))
        except (ParentGone, asyncio.CancelledError):
            raise
        except EngineDeadError:
            self.engine_died()
        except Exception as error:
            self._channel.fail(request.id, error)

    def engine_died(self) -> None:
        """End the process: an engine that cannot sample is gone. Its log says how each process of vLLM ended that has."""
        if not self.closing:
            manager = self._engine.engine_core.resources.engine_manager
            codes = [process.exitcode for process in manager.processes] if manager else []
            print(f"vLLM can no longer sample; exit codes of its core: {codes} (-9: killed, probable out of memory)", flush=True)
            os._exit(1)

    async def _requests(self, request: Request) -> Mapping[str, Any]:
        tokens, start = request.arrays["tokens"].tolist(), 0
        for key, length, budget, temperature, stop, kept_set, _ in request.body["new"]:
            params = sampling_params(budget=budget, temperature=temperature, stop=stop, kept_set=kept_set, eos_tokens=self._eos_tokens)
            self._waiting[key] = Job(key, tokens[start:start + length], params)
            start += length
        self._start_waiting()
        cancelled = [job for key in request.body["cancelled"] if (job := self._forget(key)) is not None]
        await self._stop(cancelled)
        return {}

    async def _hold(self, request: Request) -> Mapping[str, Any]:
        self._held = True
        return {"running": list(self._running)}

    async def _pause(self, request: Request) -> Mapping[str, Any]:
        kind = Interruption(request.body["kind"])
        self._held, self._paused_at_s, self._pause_kind = True, time.monotonic(), kind
        recompute = kind is Interruption.RECOMPUTE
        await self._engine.pause_generation(mode="keep", clear_cache=recompute and self._adapters is None)
        self._paused = True
        await self._outputs_processed()
        jobs = list(self._running.values())
        begun = [job for job in jobs if self._emit_partial(job)]
        if recompute and self._adapters is not None:  # a request keeps the adapters it began with: another one is to go on
            for job in begun:
                self._end(job, Status.INTERRUPTED)
        await self._stop([job for job in jobs if job.key not in self._running])
        self._recomputed_tokens = sum(len(job.tokens) + job.sent for job in begun) if recompute else 0
        self._flush()
        for job in self._running.values():
            job.kv_fresh |= recompute
        return {"messages": self._stream.messages}

    async def _fetch(self, request: Request) -> Mapping[str, Any]:
        async with asyncio.timeout(request.deadline_s):
            await self._ranks.fetch(Manifest.from_json(request.body["manifest"]))
        return {}

    async def _apply(self, request: Request) -> Mapping[str, Any]:
        if not self._paused:
            raise WeightSyncError("weights are applied only between pause and resume")
        manifest = Manifest.from_json(request.body["manifest"])
        if self._adapters is not None and any(job.sent and job.label != _label(manifest) for job in self._running.values()):
            raise WeightSyncError("a running request keeps the adapters it began with: pause with recompute or drain")
        place = self._adapters.folder_of(_label(manifest)) if self._adapters else ""
        async with asyncio.timeout(request.deadline_s):
            await self._ranks.fetch(manifest)
        try:
            state_hash = await self._ranks.apply(manifest, adapters=place)
        except Exception:
            if self._ranks.version != self._version:
                self._version, self._why_no_version = None, self._ranks.why_none
            raise
        await self._label_weights(manifest)
        return {"state_hash": state_hash, "pause_s": time.monotonic() - self._paused_at_s, "recomputed_tokens": self._recomputed_tokens}

    async def _label_weights(self, manifest: Manifest) -> None:
        """What is sampled from now on is of the manifest's version; keys that are kept are of an older one."""
        label = _label(manifest)
        if label == self._label and self._version is not None:
            return
        self._version, self._why_no_version = None, "the label of its version was not set"
        if self._adapters is not None:
            await self._adapters.change(label)
        await self._engine.update_weight_version(label)
        self._label, self._version = label, manifest.version
        for job in self._running.values():
            job.kv_fresh = self._pause_kind is Interruption.RECOMPUTE

    async def _resume(self, request: Request) -> Mapping[str, Any]:
        if self._version is None:
            raise WeightSyncError(f"no version is held to sample from: {self._why_no_version}")
        restarted = [job for job in self._running.values() if not job.sent and job.label != self._label]
        for job in restarted:
            del self._running[job.key]
        self._waiting = {job.key: job for job in restarted} | self._waiting
        await self._stop(restarted)
        await self._engine.resume_generation()
        self._held = self._paused = False
        self._start_waiting()
        return {}

    async def _health(self, request: Request) -> Mapping[str, Any]:
        return {"version": NOT_SAMPLED if self._version is None else self._version,
                "running_requests": self._engine.get_num_unfinished_requests() + len(self._waiting),
                "peak_memory_bytes": await self._ranks.peak_memory_bytes() + peak_memory_bytes()}

    async def _ask(self, method: str, arguments: tuple[Any, ...]) -> list[dict[str, Any]]:
        """What the extension of each worker answers."""
        return list(await self._engine.collective_rpc(method, args=arguments))

    def _start_waiting(self) -> None:
        if not self._held:
            waiting, self._waiting = self._waiting, {}
            for job in waiting.values():
                self._begin(job)

    def _begin(self, job: Job) -> None:
        job.label, job.kv_fresh, job.started = self._label, True, job.started + 1
        job.adapters = self._adapters and self._adapters.request
        self._running[job.key] = job
        job.task = asyncio.create_task(self._generate(job))

    async def _generate(self, job: Job) -> None:
        prompt = {"prompt_token_ids": job.tokens, "cache_salt": job.label}
        try:
            async for output in self._engine.generate(prompt, job.params, job.request_id, lora_request=job.adapters):
                self._finish(job, output.outputs[0])
        except EngineDeadError:
            self.engine_died()
        except Exception as error:
            self._end(job, Status.ENGINE_ERROR, " ".join(f"{type(e).__name__}: {e}" for e in (error, error.__cause__) if e is not None))

    def _finish(self, job: Job, output: CompletionOutput) -> None:
        """The one output of a request: all it wrote. Raises EngineError."""
        if output.finish_reason not in ("stop", "length"):
            raise EngineError(f"vLLM ended the request with {output.finish_reason!r}")
        if self._emit(job, list(output.token_ids), output.logprobs):
            job.check_stamps(output)
            self._end(job, Status(output.finish_reason))
        else:
            self._end(job, Status.NONFINITE_LOGPROB)

    def _emit_partial(self, job: Job) -> bool:
        """Emit what a running request has written; whether it goes on and has written. The one place that reads vLLM's own states."""
        states = self._engine.output_processor
        state = states.request_states[states.external_req_ids[job.request_id][0]]
        try:
            goes_on = self._emit(job, list(state.detokenizer.output_token_ids), state.logprobs_processor.logprobs)
        except EngineError as error:
            self._end(job, Status.ENGINE_ERROR, str(error))
            goes_on = False
        else:
            if not goes_on:
                self._end(job, Status.NONFINITE_LOGPROB)
        return goes_on and job.sent > 0

    def _emit(self, job: Job, tokens: list[int], logprobs: FlatLogprobs | None) -> bool:
        """Emit what is new in `tokens`; False when a logprob is no number, and only what comes before it was emitted."""
        if logprobs is None or len(logprobs.logprobs) != len(tokens):
            raise EngineError(f"vLLM gave {len(tokens)} tokens and {'no' if logprobs is None else len(logprobs.logprobs)} logprobs")
        new = logprobs.logprobs[job.sent:]
        count = next((index for index, logprob in enumerate(new) if not isfinite(logprob)), len(new))
        if count:
            self._put(Emission(job.key, tokens[job.sent:job.sent + count], new[:count], job.kv_fresh, None))
            job.stamps.append((self._label, count))
            job.sent += count
        return count == len(new)

    def _end(self, job: Job, finish: Status, error: str = "") -> None:
        self._running.pop(job.key, None)
        self._put(Emission(job.key, (), (), job.kv_fresh, finish, error))

    def _put(self, emission: Emission) -> None:
        if not self._emissions:
            asyncio.get_running_loop().call_soon(self._flush)
        self._emissions.append(emission)

    def _flush(self) -> None:
        """Send what was emitted in this turn of the loop as one message."""
        emissions, self._emissions = self._emissions, []
        self._stream.send(emissions, version=self._version)

    def _forget(self, key: str) -> Job | None:
        return self._running.pop(key, None) if self._waiting.pop(key, None) is None else None

    async def _stop(self, jobs: list[Job]) -> None:
        """Abort requests; returns when vLLM has forgotten them."""
        tasks = [job.task for job in jobs if job.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _outputs_processed(self) -> None:
        """Waits until vLLM knows every request that was begun, and each output of its core has reached the request it belongs to."""
        queue, states, quiet, seen = self._engine.engine_core.outputs_queue, self._engine.output_processor, 0, -1
        while quiet < _QUIET_TICKS:
            await asyncio.sleep(0)
            written = sum(state.detokenizer.num_output_tokens() for state in states.request_states.values())
            known = all(job.request_id in states.external_req_ids for job in self._running.values())
            quiet = quiet + 1 if known and queue.empty() and written == seen else 0
            seen = written


def _label(manifest: Manifest) -> str:
    """What vLLM calls a version."""
    return f"{manifest.run_epoch}.{manifest.version}"


def sampling_params(*, budget: int, temperature: float, stop: list[str], kept_set: tuple[float, int, float],
                    eos_tokens: list[int]) -> SamplingParams:
    """One request's parameters, every field that touches the distribution explicit; the logprob of each sampled token and no other."""
    top_p, top_k, min_p = kept_set
    return SamplingParams(
        n=1, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, repetition_penalty=1.0, presence_penalty=0.0,
        frequency_penalty=0.0,
        min_tokens=0, max_tokens=budget, stop=stop or None, stop_token_ids=eos_tokens, ignore_eos=True, seed=None, logit_bias=None,
        bad_words=None, allowed_token_ids=None, logprobs=0, flat_logprobs=True, detokenize=bool(stop), skip_special_tokens=False,
        skip_clone=True,
        output_kind=RequestOutputKind.FINAL_ONLY)
