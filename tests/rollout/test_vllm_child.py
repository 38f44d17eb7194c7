"""The child of the vLLM engine over an AsyncLLM that follows a script: what vLLM rarely or never does must still end in an error."""

from __future__ import annotations

import asyncio
import importlib.util
import warnings
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from asyncrl.channel import Request
from asyncrl.errors import WeightSyncError, WrongBase, describe_error
from asyncrl.types import Status
from asyncrl.weights.manifest import Manifest

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")]


@pytest.fixture(scope="module")
def vllm_child() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own, on import
        from asyncrl.rollout import vllm_child
    return vllm_child


@dataclass
class ScriptedEngine:
    """What `_Child` uses of AsyncLLM. A request writes what `written` says, and ends when `ends` is set."""

    finished: dict[str, Any] = field(default_factory=dict)
    """What `generate` gives in the end: an output, or an exception to raise."""
    states: dict[str, Any] = field(default_factory=dict)
    worker: dict[str, Callable[..., dict[str, Any]]] = field(default_factory=dict)
    label_fails: bool = False
    clearing_fails: bool = False
    cleared: list[bool] = field(default_factory=list)
    """Whether each pause so far was to clear the caches."""
    labels: list[str] = field(default_factory=list)
    prompts: list[tuple[str, str]] = field(default_factory=list)
    """(request id, salt) of each request it was given."""
    ends: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.engine_core = SimpleNamespace(outputs_queue=asyncio.Queue())
        self.output_processor = SimpleNamespace(request_states=self.states, external_req_ids={})

    async def generate(self, prompt: dict[str, Any], params: object, request_id: str, *, lora_request: None) -> AsyncIterator[Any]:
        self.prompts.append((request_id, prompt["cache_salt"]))
        self.states.setdefault(request_id, state([], []))
        self.output_processor.external_req_ids[request_id] = [request_id]
        try:
            await self.ends.wait()
        finally:
            del self.states[request_id], self.output_processor.external_req_ids[request_id]
        end = self.finished[request_id]
        if isinstance(end, Exception):
            raise end
        yield SimpleNamespace(outputs=[end])

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.cleared.append(clear_cache)
        if clear_cache and self.clearing_fails:
            raise RuntimeError("Failed to reset KV cache even when all the running requests are preempted")

    async def resume_generation(self) -> None: ...

    async def update_weight_version(self, label: str) -> None:
        if self.label_fails:
            raise RuntimeError("no answer")
        self.labels.append(label)

    async def collective_rpc(self, method: str, *, args: tuple[str, ...]) -> list[dict[str, Any]]:
        return [self.worker[method](*args)]

    def get_num_unfinished_requests(self) -> int:
        return len(self.states)


class Sent:
    """A channel that keeps what was sent."""

    def __init__(self) -> None:
        self.rows: list[tuple[int | None, list[int], tuple[Any, ...]]] = []
        self.answers: dict[int, Any] = {}

    def reply(self, request_id: int, body: dict[str, Any], *, arrays: dict[str, Any] | None = None, last: bool = True) -> None:
        if last:
            self.answers[request_id] = body
            return
        start = 0
        for row in body["rows"]:
            self.rows.append((body["version"], arrays["tokens"][start:start + row[1]].tolist(), tuple(row)))
            start += row[1]

    def fail(self, request_id: int, error: BaseException) -> None:
        self.answers[request_id] = error


def state(tokens: list[int], logprobs: list[float]) -> SimpleNamespace:
    detokenizer = SimpleNamespace(output_token_ids=tokens, num_output_tokens=lambda: len(tokens))
    return SimpleNamespace(detokenizer=detokenizer, logprobs_processor=SimpleNamespace(logprobs=SimpleNamespace(logprobs=logprobs)))


def output(tokens: list[int], *, spans: list[tuple[str, int, int]] | None, logprobs: list[float] | None = None,
           finish_reason: str = "length") -> SimpleNamespace:
    versions = None if spans is None else [SimpleNamespace(version=label, start=start, end=end) for label, start, end in spans]
    flat = SimpleNamespace(logprobs=[-1.0] * len(tokens) if logprobs is None else logprobs)
    return SimpleNamespace(token_ids=tokens, logprobs=flat, finish_reason=finish_reason, weight_versions=versions)


def manifest(version: int) -> str:
    return Manifest(run_epoch=0, version=version, base=None, parts=(), tensors=(), state_hash=version).to_json()


def story(vllm_child: ModuleType, engine_made: Callable[[], ScriptedEngine], steps) -> tuple[ScriptedEngine, Sent]:
    """Run `steps(call, engine)` against a child that holds version 0 and has one request, "0", running."""

    async def main() -> tuple[ScriptedEngine, Sent]:
        engine, sent = engine_made(), Sent()
        held = {"version": None, "state_hash": None, "poisoned": ""}

        def apply(text: str, adapters: str, predicted: int) -> dict[str, Any]:
            held.update(version=Manifest.from_json(text).version, state_hash=predicted)
            return {"state_hash": predicted}

        engine.worker = {
            "asyncrl_fetch": lambda text: {"begun": None},
            "asyncrl_fetched": lambda text: {"shares": {"": Manifest.from_json(text).state_hash}},
            "asyncrl_apply": apply, "asyncrl_state": lambda: held | {"peak_memory_bytes": 0},
            "asyncrl_poison": lambda why: held.update(version=None, state_hash=None, poisoned=why) or {}}
        child = vllm_child._Child(sent, engine, eos_tokens=[1], adapters=None)

        async def call(op: str, body: dict[str, Any] | None = None, **arrays: Any) -> Any:
            number = len(sent.answers) + 10
            await child.handle(Request(op, number, body or {}, arrays))
            return sent.answers.get(number)

        await call("chunks")
        await call("pause", {"kind": "keep"})
        await call("apply", {"manifest": manifest(0)})
        await call("resume")
        row = ["0", 2, 5, 1.0, [], [1.0, 0, 0.0], [False, False]]
        await call("requests", {"new": [row], "cancelled": []}, tokens=np.array([7, 8], np.int32))
        await asyncio.sleep(0)
        await steps(call, engine)
        engine.ends.set()
        await asyncio.gather(*(job.task for job in list(child._running.values())))
        await asyncio.sleep(0)
        return engine, sent

    return asyncio.run(asyncio.wait_for(main(), 20))


async def nothing(call, engine) -> None:
    """The request runs to its end."""


@pytest.mark.parametrize(("end", "says"), [
    (output([3, 4], spans=[("0.1", 0, 2)]), "tokens were stamped with [('0.0', 2)], vLLM's record is [('0.1', 2)]"),
    (output([3, 4], spans=None), "vLLM's record is []"),
    (output([3, 4], spans=[("0.0", 0, 1)]), "vLLM's record is [('0.0', 1)]"),
    (output([3, 4], spans=[("0.0", 0, 2)], logprobs=[-1.0]), "vLLM gave 2 tokens and 1 logprobs"),
    (output([3, 4], spans=[("0.0", 0, 2)], finish_reason="abort"), "vLLM ended the request with 'abort'"),
    (RuntimeError("no room"), "RuntimeError: no room"),
])
def test_what_vllm_should_not_do_ends_its_request_with_an_error(vllm_child: ModuleType, end: object, says: str) -> None:
    _, sent = story(vllm_child, lambda: ScriptedEngine(finished={"0.1": end}), nothing)
    key, _, _, finish, error, *_ = sent.rows[-1][2]
    assert (key, finish) == ("0", Status.ENGINE_ERROR.value)
    assert says in error


def test_stamps_that_agree_end_a_request_well(vllm_child: ModuleType) -> None:
    _, sent = story(vllm_child, lambda: ScriptedEngine(finished={"0.1": output([3, 4], spans=[("0.0", 0, 2)])}), nothing)
    assert [(version, tokens, row[3]) for version, tokens, row in sent.rows] == [(0, [3, 4], None), (0, [], Status.LENGTH.value)]


def test_what_was_written_before_an_update_is_of_the_old_version_and_what_comes_after_of_the_new(vllm_child: ModuleType) -> None:
    async def update(call, engine: ScriptedEngine) -> None:
        engine.states["0.1"] = state([3, 4], [-1.0, -2.0])
        await call("pause", {"kind": "keep"})
        await call("apply", {"manifest": manifest(1)})
        await call("resume")

    end = output([3, 4, 5], spans=[("0.0", 0, 2), ("0.1", 2, 3)])
    engine, sent = story(vllm_child, lambda: ScriptedEngine(finished={"0.1": end}), update)
    assert [(version, tokens, row[2]) for version, tokens, row in sent.rows] == [(0, [3, 4], True), (1, [5], False), (1, [], False)]
    assert sent.rows[-1][2][3] == Status.LENGTH.value
    assert engine.labels == ["0.0", "0.1"]


def test_a_token_sampled_under_a_pause_that_was_not_kept_is_found_out(vllm_child: ModuleType) -> None:
    async def update(call, engine: ScriptedEngine) -> None:
        engine.states["0.1"] = state([3], [-1.0])
        await call("pause", {"kind": "keep"})
        await call("apply", {"manifest": manifest(1)})
        await call("resume")

    end = output([3, 4, 5], spans=[("0.0", 0, 2), ("0.1", 2, 3)])
    _, sent = story(vllm_child, lambda: ScriptedEngine(finished={"0.1": end}), update)
    assert sent.rows[-1][2][3] == Status.ENGINE_ERROR.value


def test_a_request_without_a_token_starts_again_under_the_new_version(vllm_child: ModuleType) -> None:
    async def update(call, engine: ScriptedEngine) -> None:
        await call("pause", {"kind": "keep"})
        await call("apply", {"manifest": manifest(1)})
        await call("resume")
        await asyncio.sleep(0)

    engine, sent = story(vllm_child, lambda: ScriptedEngine(finished={"0.2": output([3], spans=[("0.1", 0, 1)])}), update)
    assert engine.prompts == [("0.1", "0.0"), ("0.2", "0.1")]
    assert [(version, tokens, row[2]) for version, tokens, row in sent.rows] == [(1, [3], True), (1, [], True)]


@pytest.mark.parametrize("kind", ["keep", "recompute", "drain"])
def test_no_block_of_an_older_version_is_found_after_an_update(vllm_child: ModuleType, kind: str) -> None:
    async def update(call, engine: ScriptedEngine) -> None:
        engine.states["0.1"] = state([3], [-1.0])
        await call("pause", {"kind": kind})
        await call("apply", {"manifest": manifest(1)})
        await call("resume")
        row = ["1", 2, 5, 1.0, [], [1.0, 0, 0.0], [False, False]]
        await call("requests", {"new": [row], "cancelled": []}, tokens=np.array([7, 8], np.int32))
        await asyncio.sleep(0)

    engine, _ = story(vllm_child, lambda: ScriptedEngine(finished={
        "0.1": output([3, 4], spans=[("0.0", 0, 1), ("0.1", 1, 2)]), "1.1": output([3], spans=[("0.1", 0, 1)])}), update)
    assert engine.prompts == [("0.1", "0.0"), ("1.1", "0.1")]  # the same prompt, under a salt of its own
    assert engine.cleared == [False, kind == "recompute"]


def test_a_cache_that_cannot_be_cleared_fails_the_update_and_the_old_version_goes_on(vllm_child: ModuleType) -> None:
    answers: list[Any] = []

    async def update(call, engine: ScriptedEngine) -> None:
        engine.clearing_fails = True
        answers.append(await call("pause", {"kind": "recompute"}))
        answers.append(await call("apply", {"manifest": manifest(1)}))
        answers.append(await call("resume"))
        answers.append((await call("health"))["version"])
        await asyncio.sleep(0)

    engine, _ = story(vllm_child, lambda: ScriptedEngine(finished={"0.1": output([3], spans=[("0.0", 0, 1)])}), update)
    assert "Failed to reset KV cache" in str(answers[0])
    assert "only between pause and resume" in str(answers[1])
    assert answers[2:] == [{}, 0]
    assert engine.labels == ["0.0"]


def test_requests_are_served_while_a_version_is_fetched(vllm_child: ModuleType) -> None:
    seen: list[Any] = []

    async def update(call, engine: ScriptedEngine) -> None:
        looked = asyncio.Event()
        fetched = engine.worker["asyncrl_fetched"]
        engine.worker["asyncrl_fetched"] = lambda text: looked.set() or {"shares": None}
        fetch = asyncio.create_task(call("fetch", {"manifest": manifest(1)}))
        await looked.wait()
        row = ["1", 2, 5, 1.0, [], [1.0, 0, 0.0], [False, False]]
        seen.append(await call("requests", {"new": [row], "cancelled": []}, tokens=np.array([7, 8], np.int32)))
        await asyncio.sleep(0)
        seen.append([request_id for request_id, _ in engine.prompts])
        seen.append(await fetch)  # no answer yet: the fetch goes on beside
        engine.worker["asyncrl_fetched"] = fetched
        await call("pause", {"kind": "keep"})
        seen.append(await call("apply", {"manifest": manifest(1)}))
        await call("resume")

    engine, _ = story(vllm_child, lambda: ScriptedEngine(finished={
        "0.2": output([3], spans=[("0.1", 0, 1)]), "1.2": output([3], spans=[("0.1", 0, 1)])}), update)
    assert seen[:3] == [{}, ["0.1", "1.1"], None]
    assert seen[3]["state_hash"] == 1
    assert engine.labels == ["0.0", "0.1"]


def test_a_fetch_that_fails_says_so_in_its_class_and_leaves_the_version(vllm_child: ModuleType) -> None:
    answers: list[Any] = []

    async def update(call, engine: ScriptedEngine) -> None:
        engine.worker["asyncrl_fetched"] = lambda text: {"error": describe_error(WrongBase("version 7 builds on 6"))}
        await call("fetch", {"manifest": manifest(7)})
        answers.append(await call("health"))

    _, sent = story(vllm_child, lambda: ScriptedEngine(finished={"0.1": output([3], spans=[("0.0", 0, 1)])}), update)
    assert [type(answer) for answer in sent.answers.values()].count(WrongBase) == 1
    assert answers[0]["version"] == 0


def test_a_refused_update_keeps_the_version_and_the_errors_class(vllm_child: ModuleType) -> None:
    answers: list[Any] = []

    async def update(call, engine: ScriptedEngine) -> None:
        engine.worker["asyncrl_fetched"] = lambda text: {"error": describe_error(WrongBase("version 7 builds on 6"))}
        await call("pause", {"kind": "keep"})
        answers.append(await call("apply", {"manifest": manifest(7)}))
        answers.append(await call("resume"))
        await asyncio.sleep(0)

    story(vllm_child, lambda: ScriptedEngine(finished={"0.1": output([3], spans=[("0.0", 0, 1)])}), update)
    assert type(answers[0]) is WrongBase
    assert answers[1] == {}


@pytest.mark.parametrize("failure", ["the label", "the answer"])
def test_weights_whose_version_is_not_known_are_not_sampled_from(vllm_child: ModuleType, failure: str) -> None:
    answers: list[Any] = []

    async def update(call, engine: ScriptedEngine) -> None:
        apply = engine.worker["asyncrl_apply"]

        def written_but_lost(text: str, adapters: str, predicted: int) -> dict[str, Any]:
            apply(text, adapters, predicted)
            raise RuntimeError("the answer was lost")

        engine.label_fails = failure == "the label"
        if failure == "the answer":
            engine.worker["asyncrl_apply"] = written_but_lost
        await call("pause", {"kind": "keep"})
        await call("apply", {"manifest": manifest(1)})
        answers.append(await call("resume"))

    story(vllm_child, lambda: ScriptedEngine(finished={"0.1": output([3], spans=[("0.0", 0, 1)])}), update)
    assert type(answers[0]) is WeightSyncError


def test_every_field_that_could_bend_the_distribution_is_explicit(vllm_child: ModuleType) -> None:
    params = vllm_child.sampling_params(budget=7, temperature=0.7, stop=["</s>"], kept_set=(1.0, 0, 0.0), eos_tokens=[1, 5])
    neutral = {"n": 1, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
               "min_tokens": 0, "logit_bias": None, "bad_words": None, "allowed_token_ids": None, "seed": None}
    assert {name: getattr(params, name) or neutral[name] for name in neutral} == neutral
    assert (params.max_tokens, params.temperature, params.logprobs, params.stop_token_ids, params.ignore_eos) == (7, 0.7, 0, [1, 5], True)
    assert (params.stop, params.skip_special_tokens) == (["</s>"], False)
    kept = vllm_child.sampling_params(budget=7, temperature=0.7, stop=[], kept_set=(0.9, 20, 0.1), eos_tokens=[])
    assert (kept.top_p, kept.top_k, kept.min_p) == (0.9, 20, 0.1)
