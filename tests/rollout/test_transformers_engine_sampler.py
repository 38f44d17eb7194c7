"""Continuous batching without the child: what an upgrade of transformers or a misbehaving loop would break."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel
from transformers.generation.logits_process import TopKLogitsWarper

from asyncrl.errors import AbortNotHonoured, EngineError
from asyncrl.rollout import transformers_scheduler
from asyncrl.rollout.engine import Interruption
from asyncrl.rollout.loaded_model import load_model
from asyncrl.rollout.transformers_sampler import Emission, Job, Limits, Sampler
from asyncrl.types import Status
from tests.tiny_model import make_tiny_model

LIMITS = Limits(max_batch_tokens=64, max_running_requests=2, kv_cache_tokens=512)


@pytest.fixture
def model(tmp_path: Path) -> PreTrainedModel:
    torch.set_num_threads(1)
    return load_model(make_tiny_model(tmp_path), dtype="float32")


class Inbox:
    """Collects emissions and waits for ends."""

    def __init__(self) -> None:
        self.emissions: list[Emission] = []
        self._ended = threading.Semaphore(0)

    def __call__(self, emissions: list[Emission]) -> None:
        self.emissions += emissions
        for emission in emissions:
            if emission.finish:
                self._ended.release()

    def forget_ends(self) -> None:
        """`wait` counts from here."""
        while self._ended.acquire(blocking=False):
            pass

    def wait(self, count: int) -> None:
        for _ in range(count):
            assert self._ended.acquire(timeout=30)


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


@pytest.fixture
def start(model: PreTrainedModel, inbox: Inbox) -> Iterator[Callable[[], Sampler]]:
    samplers: list[Sampler] = []

    def make() -> Sampler:
        samplers.append(Sampler(model, eos_tokens=(), limits=LIMITS, seed=0, emit=inbox))
        return samplers[-1]

    yield make
    for sampler in samplers:
        sampler.close()


def test_a_token_sampled_under_a_pause_is_not_tolerated(start: Callable[[], Sampler], inbox: Inbox) -> None:
    sampler = start()
    sampler.submit([Job("long", [3, 4], 200, 1.0), Job("short", [3, 4], 3, 1.0)])
    sampler.resume()
    inbox.wait(1)
    sampler.pause(Interruption.KEEP)
    sampler.check_parked()
    state = sampler._manager.batch_processor.scheduler.active_requests["long"]
    state.logprobs.append(-1.0)
    with pytest.raises(AbortNotHonoured, match="1 tokens were sampled after the pause"):
        sampler.check_parked()
    state.logprobs.pop()


def test_a_pause_while_paused_lets_nothing_run_in_between(start: Callable[[], Sampler], inbox: Inbox) -> None:
    sampler = start()
    sampler.submit([Job("a", [3, 4], 5, 1.0)])
    for kind in (Interruption.KEEP, Interruption.RECOMPUTE):
        sampler.pause(kind)
        assert inbox.emissions == []
    sampler.resume()
    inbox.wait(1)
    assert len(inbox.emissions[-1].tokens) == 5


def test_requests_start_in_arrival_order_and_no_more_at_once_than_allowed(start: Callable[[], Sampler], inbox: Inbox) -> None:
    sampler = start()
    sampler.submit(Job(key, [3, 4], 4, 1.0) for key in "abcdef")
    assert sampler.running_requests == 6
    sampler.resume()
    inbox.wait(6)
    assert [emission.key for emission in inbox.emissions] == list("abcdef")


def test_a_cancelled_request_is_never_heard_of_and_makes_room(start: Callable[[], Sampler], inbox: Inbox) -> None:
    sampler = start()
    sampler.submit(Job(key, [3, 4], 6, 1.0) for key in "abcd")
    sampler.cancel(["a", "c", "unknown"])
    sampler.resume()
    inbox.wait(2)
    assert [emission.key for emission in inbox.emissions] == ["b", "d"]
    assert sampler.running_requests == 0


def test_recompute_interrupts_what_runs_and_keeps_what_waits(start: Callable[[], Sampler], inbox: Inbox) -> None:
    sampler = start()
    sampler.submit([Job("long", [3, 4], 200, 1.0), Job("short", [3, 4], 3, 1.0)])
    sampler.resume()
    inbox.wait(1)
    assert sampler.hold() == ["long"]
    sampler.submit([Job("waiting", [3, 4], 3, 1.0)])
    sampler.pause(Interruption.RECOMPUTE)
    written = {emission.key: emission for emission in inbox.emissions}
    assert {key: emission.finish for key, emission in written.items()} == {"short": Status.LENGTH, "long": Status.INTERRUPTED}
    # the cache holds the prompt and all sampled tokens but the newest
    assert sampler.interrupted_tokens == 2 + len(written["long"].tokens) - 1
    sampler.resume()
    inbox.wait(2)
    assert inbox.emissions[-1].key == "waiting"


@pytest.mark.parametrize("give_up", [
    lambda sampler, running: sampler.pause(Interruption.RECOMPUTE),
    lambda sampler, running: sampler.cancel(running),
    lambda sampler, running: [sampler._broken(sampler._states()[key]) for key in running],
], ids=["recompute", "cancel", "broken logits"])
def test_requests_set_back_by_a_full_cache_go_on_when_all_that_ran_are_given_up(
        model: PreTrainedModel, inbox: Inbox, give_up: Callable[[Sampler, list[str]], object]) -> None:
    keys = [f"{index}" for index in range(12)]
    limits = Limits(max_batch_tokens=16, max_running_requests=len(keys), kv_cache_tokens=256)
    sampler = Sampler(model, eos_tokens=(), limits=limits, seed=0, emit=inbox)
    try:
        _pause_when_set_back(sampler, [Job(key, [3, 4], 200, 1.0) for key in keys])
        scheduler = sampler._batches().scheduler
        running, set_back = list(scheduler.active_requests), list(scheduler.waiting_requests)
        assert running
        assert set_back
        assert scheduler.block_new_requests
        give_up(sampler, running)
        inbox.forget_ends()
        sampler.resume()
        inbox.wait(len(set_back))
        for key in set_back:
            heard = [emission for emission in inbox.emissions if emission.key == key]
            assert sum(len(emission.tokens) for emission in heard) == 200
            assert heard[-1].finish is Status.LENGTH
    finally:
        sampler.close()


def test_requests_that_nobody_takes_end_the_sampler_with_what_stands_still(
        start: Callable[[], Sampler], inbox: Inbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(transformers_scheduler, "STANDSTILL_S", 0.2)
    sampler = start()
    sampler._batches().scheduler.block_new_requests = True
    sampler.submit([Job("a", [3, 4], 6, 1.0)])
    sampler.resume()
    assert sampler.wait_until_stopped() is False
    assert inbox.emissions == []
    failure = sampler._manager.background_thread_status.fatal_error
    assert str(failure) == ("none of 0 active and 1 waiting requests has been taken for 0.2 s; 100% of the cache is free, new requests are "
                            "kept out")


def test_a_distribution_that_would_be_reshaped_is_refused(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    original = type(model)._get_logits_processor
    monkeypatch.setattr(type(model), "_get_logits_processor",
                        lambda self, config: type(original(self, config))([*original(self, config), TopKLogitsWarper(5)]))
    with pytest.raises(EngineError, match=r"reshape the distribution with .*TopK"):
        Sampler(model, eos_tokens=(), limits=LIMITS, seed=0, emit=lambda emissions: None)


def test_a_forward_that_fails_ends_the_sampler_and_not_quietly(start: Callable[[], Sampler], model: PreTrainedModel, inbox: Inbox,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no memory left")

    sampler = start()
    monkeypatch.setattr(type(model), "forward", fail)
    sampler.submit([Job("a", [3, 4], 6, 1.0)])
    sampler.resume()
    assert sampler.wait_until_stopped() is False
    assert inbox.emissions == []
    with pytest.raises(EngineError, match="takes no more requests"):
        sampler.submit([Job("b", [3, 4], 6, 1.0)])


def _pause_when_set_back(sampler: Sampler, jobs: list[Job]) -> None:
    """Run `jobs` until the full cache sets requests back, and pause right after the step that did it."""
    manager, offloading = sampler._manager, sampler._batches().offloading_manager
    set_back, offload = threading.Event(), offloading.offload_requests

    def offload_and_wait() -> bool:
        done = offload()
        set_back.set()
        while not manager.background_thread_status.is_pause_requested():
            time.sleep(0.001)
        return done

    offloading.offload_requests = offload_and_wait
    sampler.submit(jobs)
    sampler.resume()
    assert set_back.wait(30)
    sampler.pause(Interruption.KEEP)
    offloading.offload_requests = offload
