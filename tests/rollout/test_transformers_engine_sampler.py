"""Continuous batching without the child: what an upgrade of transformers or a misbehaving loop would break."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel
from transformers.generation.logits_process import TopKLogitsWarper

from asyncrl.errors import AbortNotHonoured, EngineError
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
