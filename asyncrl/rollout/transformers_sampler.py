"""Hugging Face continuous batching with a pause that is exact to the token. Lives in the engine's child.

    submit ──▶ waiting ──▶ manager (generation thread: forward, sample) ──▶ finished ──▶ emit
                  ▲ hold                    │ pause: parked between two steps
                  └─ resume ◀─ write weights ◀─ partial tokens read, emitted

Two threads meet here: the generation thread calls `_finished` and `_broken`, the serving thread everything else.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingTemperatureLogitsWarper
from transformers.generation.continuous_batching.continuous_api import (
    BackgroundThreadStatus,
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
    OutputRouter,
)
from transformers.generation.continuous_batching.requests import FutureRequestState, GenerationOutput, RequestState, RequestStatus

from asyncrl.errors import AbortNotHonoured, EngineError
from asyncrl.expert_routing import Routing
from asyncrl.records import NOTHING_WANTED, Wanted
from asyncrl.rollout.chunk_stream import Emission
from asyncrl.rollout.engine import Interruption
from asyncrl.rollout.pending_records import PendingRecords
from asyncrl.rollout.transformers_scheduler import Scheduler, replace_scheduler
from asyncrl.rollout.truncation import WHOLE, Truncation, ids_of
from asyncrl.rollout.truncation import Limits as TruncationLimits
from asyncrl.types import Status

PAGE_TOKENS = 32
"""Of the paged cache: small enough that 512 short requests waste little, large enough that page tables stay short."""

_STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Limits:
    """How much the engine does at once."""

    max_batch_tokens: int
    max_running_requests: int
    kv_cache_tokens: int


@dataclass(frozen=True, slots=True)
class Job:
    """One request as the child knows it."""

    key: str
    tokens: list[int]
    max_new_tokens: int
    temperature: float
    truncation: TruncationLimits = WHOLE
    wanted: Wanted = NOTHING_WANTED


@dataclass(slots=True)
class _Running:
    truncation: TruncationLimits
    records: PendingRecords
    emitted_tokens: int = 0
    kv_fresh: bool = True


class Sampler:
    """Samples jobs in arrival order, `max_running_requests` at a time.

    `emit` receives finished jobs from the generation thread and, at a pause, what the others have so far from the pausing one;
    calls never overlap. Starts paused.
    """

    def __init__(self, model: PreTrainedModel, *, eos_tokens: Iterable[int], limits: Limits, seed: int,
                 emit: Callable[[list[Emission]], None], routing: Routing | None = None) -> None:
        self._eos_tokens = sorted(eos_tokens)
        self._limits, self._emit = limits, emit
        self._lock = threading.RLock()
        self._waiting: dict[str, Job] = {}
        self._running: dict[str, _Running] = {}
        self._held = False
        self._sampled_at_pause = 0
        self._is_recording = False
        self._cache_bytes = 0
        self._closing = False
        self._pause = contextlib.ExitStack()
        self.paused = False
        """Whether the generation thread is parked."""
        self.interrupted_tokens = 0
        """Tokens whose keys and values the newest pause gave up."""
        self._routing = routing
        if routing is not None:
            model.register_forward_pre_hook(lambda *_: self._before_forward())
            model.register_forward_hook(lambda *_: self._after_forward())
        self._manager = _manager(model, limits, seed=seed, guard=_Guard(self._running, self._broken))
        self._manager.output_router = _Router(self._finished)
        self._manager.start()
        self.pause(Interruption.DRAIN)
        _check_batches(self._batches())
        replace_scheduler(self._batches())

    def submit(self, jobs: Iterable[Job]) -> None:
        """Queue jobs; they start as soon as there is room, and none while held or paused."""
        with self._lock:
            self._waiting |= {job.key: job for job in jobs}
            self._fill()

    def cancel(self, keys: Iterable[str]) -> None:
        """Forget jobs: nothing of them is emitted any more. Unknown keys are ignored."""
        with self._lock:
            for key in keys:
                if self._waiting.pop(key, None) is None and self._running.pop(key, None) is not None:
                    self._manager.cancel_request(key)
            self._fill()

    def hold(self) -> list[str]:
        """Start no more jobs until `resume`; returns the keys that are running."""
        with self._lock:
            self._held = True
            return list(self._running)

    def pause(self, kind: Interruption) -> None:
        """Returns when sampling has stopped between two steps and every token has been emitted.

        Under `RECOMPUTE` jobs that have a cache end with INTERRUPTED. To be called, like `resume`, on one thread.
        """
        self.hold()
        if not self.paused:
            self._pause.enter_context(self._manager.pause())
            self.paused = True
        with self._lock:
            self.interrupted_tokens = 0
            states = self._states()
            emissions = [self._partial(key, states[key], kind) for key in list(self._running) if key in states]
            self._sampled_at_pause = self._sampled_tokens()
            self._emit([emission for emission in emissions if emission.tokens or emission.finish])

    def mark_stale(self) -> None:
        """The weights were written: what is cached is of an older version now.

        A job that later gives its cache up for lack of room keeps the mark, though its keys are then computed anew.
        """
        with self._lock:
            states = self._states()
            for key, running in self._running.items():
                running.kv_fresh = key not in states or states[key].position_offset == 0

    def check_parked(self) -> None:
        """Raise AbortNotHonoured when a token has been sampled since the pause."""
        extra = self._sampled_tokens() - self._sampled_at_pause
        if extra:
            raise AbortNotHonoured(f"{extra} tokens were sampled after the pause")

    def resume(self) -> None:
        """Sample again."""
        self.paused = False
        self._pause.close()
        with self._lock:
            self._held = False
            self._fill()

    def release_cache(self) -> int:
        """Free the key-value cache, in bytes. Raises EngineError unless paused, and while a job has a part of it."""
        scheduler, states = self._batches().scheduler, self._states()
        with self._lock:
            holding = sum(states[key].position_offset > 0 for key in self._running if key in states)
            if not self.paused or holding:
                raise EngineError(f"the cache is given back between pause and resume, when no request holds a part; {holding} do")
            for key in states.keys() - self._running.keys():
                scheduler.set_request_cancellation(key)
            scheduler.clear_cancelled_requests()
        storage = self._batches().cache.cache_tensor.untyped_storage()
        self._cache_bytes = storage.nbytes()
        storage.resize_(0)
        return self._cache_bytes

    def restore_cache(self) -> None:
        """Take the memory of the cache again, under all views of it."""
        cache = self._batches().cache.cache_tensor
        cache.untyped_storage().resize_(self._cache_bytes)
        cache.zero_()  # as it was at first: what padding reads is multiplied by 0, and must be finite

    def take_passes_s(self) -> tuple[float, float]:
        """Seconds of prefill and of decode since the last call."""
        scheduler = self._batches().scheduler
        assert isinstance(scheduler, Scheduler)
        return scheduler.take_passes_s()

    @property
    def running_requests(self) -> int:
        """Jobs that have not ended, waiting ones included."""
        return len(self._running) + len(self._waiting)

    def wait_until_stopped(self) -> bool:
        """Block until the generation thread has ended; returns whether that was `close`."""
        thread = self._manager._generation_thread
        if thread is not None:
            thread.join()
        return self._closing

    def close(self) -> None:
        """End the generation thread."""
        self._closing = True
        self._pause.close()
        self._manager.stop(block=True, timeout=_STOP_TIMEOUT_S, hard_stop=True)

    def _fill(self) -> None:
        while self._waiting and not self._held and len(self._running) < self._limits.max_running_requests:
            job = self._waiting.pop(next(iter(self._waiting)))
            self._running[job.key] = _Running(job.truncation, PendingRecords(job.wanted, prompt_tokens=len(job.tokens)))
            accepted = self._manager.add_request(job.tokens, request_id=job.key, max_new_tokens=job.max_new_tokens,
                                                 eos_token_id=self._eos_tokens, temperature=job.temperature)
            if accepted is None:
                raise EngineError("continuous batching has stopped and takes no more requests")

    def _finished(self, outputs: list[GenerationOutput]) -> None:
        if self._manager.background_thread_status.local_status != BackgroundThreadStatus.DONT_STOP:
            return  # the loop has failed or is closing; the process ends and its exit tells the requests
        with self._lock:
            emissions = []
            for output in outputs:
                running = self._running.pop(output.request_id, None)
                if running is not None:
                    emissions.append(self._final(output, running))
            if emissions:
                self._emit(emissions)
            self._fill()

    def _final(self, output: GenerationOutput, running: _Running) -> Emission:
        if output.status is RequestStatus.FAILED:
            return Emission(output.request_id, (), (), running.kv_fresh, Status.ENGINE_ERROR, output.error or "no reason given")
        stopped = output.generated_tokens[-1] in self._eos_tokens
        return _emission(output, running, Status.STOP if stopped else Status.LENGTH)

    def _partial(self, key: str, state: RequestState, kind: Interruption) -> Emission:
        running = self._running[key]
        if kind is not Interruption.RECOMPUTE or state.position_offset == 0:
            return _emission(state.to_generation_output(), running, None)
        del self._running[key]
        self.interrupted_tokens += state.position_offset
        self._batches().scheduler.set_request_cancellation(key)
        return _emission(state.to_generation_output(), running, Status.INTERRUPTED)

    def _broken(self, state: RequestState) -> None:
        """A row of logits without a distribution: end the job before the token that would be drawn from it."""
        with self._lock:
            running = self._running.pop(state.request_id, None)
            self._batches().scheduler.set_request_cancellation(state.request_id)
            if running is not None:
                written = _emission(state.to_generation_output(), running, None)
                self._emit([written, Emission(state.request_id, (), (), running.kv_fresh, Status.NONFINITE_LOGPROB)])
                self._fill()

    def _before_forward(self) -> None:
        self._is_recording = any(running.records.wanted.routed_experts for running in list(self._running.values()))
        if self._is_recording and self._routing is not None:
            self._routing.begin()

    def _after_forward(self) -> None:
        """On the generation thread: the tokens of each request that passed through the model, in a row."""
        if not self._is_recording or self._routing is None:
            return
        experts, start = self._routing.end(), 0
        for request in self._batches().inputs_and_outputs.requests_in_batch:
            end = start + request.query_length
            running = self._running.get(request.state.request_id)
            if running is not None:
                # by now the state's offset is past them
                running.records.passed(experts[start:end], start=request.state.position_offset - request.query_length)
            start = end

    def _batches(self) -> ContinuousBatchProcessor:
        processor = self._manager.batch_processor
        assert processor is not None, "the generation thread makes it before the first pause"
        return processor

    def _states(self) -> dict[str, RequestState]:
        scheduler = self._batches().scheduler
        return scheduler.active_requests | scheduler.waiting_requests

    def _sampled_tokens(self) -> int:
        return sum(len(state.logprobs) for state in self._states().values())


class _Router(OutputRouter):
    """Hands finished requests straight to the sampler, all of one step at once, on the generation thread."""

    def __init__(self, finished: Callable[[list[GenerationOutput]], None]) -> None:
        super().__init__()
        self._on_finished = finished

    def deliver(self, output: GenerationOutput) -> None:
        self._on_finished([output])

    def deliver_batch(self, outputs: list[GenerationOutput]) -> None:
        self._on_finished(outputs)


class _Guard(ContinuousBatchingTemperatureLogitsWarper):
    """Temperature and truncation of each request; a row that softmax cannot turn into a distribution is reported, and sampled from zeros.

    Without it one NaN ends the generation thread, and every request with it.
    """

    def __init__(self, running: Mapping[str, _Running], on_broken: Callable[[RequestState], None]) -> None:
        self.temperature = 1.0
        self._running, self._on_broken = running, on_broken
        self._states: list[RequestState] = []

    def prepare_tensor_args(self, requests_with_new_token: list[FutureRequestState]) -> torch.Tensor:
        self._states = [request.state for request in requests_with_new_token]
        return super().prepare_tensor_args(requests_with_new_token)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        scores = super().__call__(scores, tensor_arg)
        whole = scores.logsumexp(-1).isfinite()
        if not bool(whole.all()):
            for index in torch.nonzero(~whole[:len(self._states)]).flatten().tolist():
                self._on_broken(self._states[index])
            scores = torch.where(whole[:, None], scores, 0.0)
        return self._truncated(scores)

    def _truncated(self, scores: torch.Tensor) -> torch.Tensor:
        """−inf outside each row's kept set, which is recorded. A job that was cancelled meanwhile is sampled as it comes.

        There are more rows than jobs while some still read their prompts; what is sampled for those is thrown away.
        """
        rows = [self._running.get(state.request_id) for state in self._states]
        limits = [WHOLE if row is None else row.truncation for row in rows] + [WHOLE] * (len(scores) - len(rows))
        truncation = Truncation.of(limits, scores.device)
        kept = None if truncation is None else truncation.kept(torch.log_softmax(scores, dim=-1))
        for index, row in enumerate(rows):
            if row is not None and row.records.wanted.kept_sets:
                row.records.sampled(np.empty(0, np.int32) if kept is None else ids_of(kept[index]))
        return scores if kept is None else scores.masked_fill(~kept, -torch.inf)


def _manager(model: PreTrainedModel, limits: Limits, *, seed: int, guard: _Guard) -> ContinuousBatchingManager:
    """A manager in which nothing but the guard reshapes the distribution, whatever the model's own generation config says."""
    # a temperature other than 1 makes the manager create the processor that the guard takes the place of
    sampling = GenerationConfig(do_sample=True, temperature=0.5, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(
        page_size=PAGE_TOKENS, num_blocks=limits.kv_cache_tokens // PAGE_TOKENS, max_batch_tokens=limits.max_batch_tokens,
        max_requests_per_batch=min(limits.max_running_requests, limits.max_batch_tokens), allow_block_sharing=False,
        use_async_batching=False, return_logprobs=True, seed=seed, auto_switch_to_flash=False, per_request_processors=True)
    manager = model.init_continuous_batching(generation_config=sampling, continuous_batching_config=batching)
    processors = manager.logit_processor.logits_processor
    if [type(processor) for processor in processors] != [ContinuousBatchingTemperatureLogitsWarper]:
        raise EngineError(f"continuous batching would reshape the distribution with {processors}")
    processors[0] = guard
    return manager


def _check_batches(processor: ContinuousBatchProcessor) -> None:
    if processor.use_async_batching or processor.cache.use_prefix_sharing or not processor.return_logprobs:
        raise EngineError("continuous batching runs asynchronously, shares prefixes or returns no logprobs, against its configuration")


def _emission(output: GenerationOutput, running: _Running, finish: Status | None) -> Emission:
    tokens, logprobs = output.generated_tokens[running.emitted_tokens:], output.logprobs[running.emitted_tokens:]
    running.emitted_tokens += len(tokens)
    return Emission(output.request_id, tokens, logprobs, running.kv_fresh, finish, records=running.records.take(len(tokens)))
