"""Continuous batching in a child: the contract through the whole proxy, one child for all rules."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from asyncrl.channel import Reply
from asyncrl.child import Child
from asyncrl.errors import ChildDied, ConfigError, EngineError
from asyncrl.rollout.engine import GenerationRequest, Interruption
from asyncrl.rollout.transformers_engine import TESTED_TRANSFORMERS, TransformersEngine
from asyncrl.types import Sampling, Status
from tests.rollout import engine_contract, records_contract, sleep_contract, start_contract
from tests.rollout.engine_contract import Rig
from tests.rollout.model_rig import EOS_TOKENS, PublishedModel, prompts, publish_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PublishedModel:
    return publish_model(tmp_path_factory.mktemp("transformers"))


@pytest.fixture(scope="module")
def rig(model: PublishedModel) -> Iterator[Rig]:
    yield from _rigs(model, max_running_requests=16)


@pytest.fixture
def cramped_rig(model: PublishedModel) -> Iterator[Rig]:
    yield from _rigs(model, kv_cache_tokens=256, max_running_requests=12, max_batch_tokens=16)


def test_nothing_is_sampled_before_an_anchor(model: PublishedModel, rig: Rig) -> None:
    rig.run(start_contract.an_engine_without_a_version_does_not_sample(rig.engine))


def test_started_again_it_is_a_new_engine(model: PublishedModel, rig: Rig) -> None:
    rig.run(start_contract.started_again_it_is_a_new_engine(rig, model.paths))


@pytest.mark.parametrize("rule", [*engine_contract.RULES, *sleep_contract.RULES, *engine_contract.MODEL_RULES],
                         ids=lambda rule: rule.__name__)
def test_contract(rig: Rig, rule) -> None:
    rig.run(rule(rig))


@pytest.mark.parametrize("rule", records_contract.KEPT_RULES, ids=lambda rule: rule.__name__)
def test_contract_of_kept_sets(rig: Rig, rule) -> None:
    rig.run(rule(rig))


@pytest.mark.parametrize("kind", [Interruption.KEEP, Interruption.RECOMPUTE])
def test_kept_sets_go_on_over_an_interruption(rig: Rig, kind: Interruption) -> None:
    rig.run(records_contract.kept_sets_go_on_over_an_interruption(rig, kind))


@pytest.mark.parametrize("kind", [Interruption.KEEP, Interruption.RECOMPUTE])
def test_every_token_over_three_versions_has_the_logprob_of_its_own(rig: Rig, kind: Interruption) -> None:
    rig.run(engine_contract.every_token_over_three_versions_has_the_logprob_of_its_own(rig, kind))


def test_the_other_version_would_have_given_other_logprobs(model: PublishedModel, rig: Rig) -> None:
    async def main() -> None:
        await rig.begin()
        written = await rig.write(rig.prompts[0], Sampling(max_new_tokens=12))
        wrong = engine_contract.Written(written.prompt, written.sampling, tuple(
            dataclasses.replace(chunk, policy_version=1) for chunk in written.chunks))
        assert np.abs(written.logprobs - rig.truth(wrong)).max() > 100 * engine_contract.TOLERANCE

    rig.run(main())


def test_keep_aborts_none_of_the_running_requests(rig: Rig) -> None:
    async def main() -> None:
        await rig.begin()
        long, short = rig.start_long(Sampling(max_new_tokens=30))
        await short
        await rig.engine.pause(Interruption.KEEP)
        before = (await rig.engine.health()).running_requests
        await rig.apply(1, 0)
        await rig.engine.resume()
        assert before > 0
        finishes = [chunk.finish for one in await asyncio.gather(*long) for chunk in one.chunks]
        assert Status.INTERRUPTED not in finishes

    rig.run(main())


def test_a_full_cache_costs_time_and_no_token(cramped_rig: Rig) -> None:
    rig = cramped_rig

    async def main() -> None:
        await rig.begin()
        for one in await rig.write_all([Sampling(max_new_tokens=70)] * len(rig.prompts)):
            rig.check(one)
        long, short = rig.start_long(Sampling(max_new_tokens=70))
        await short
        await rig.update(1, 0, Interruption.RECOMPUTE)
        for one in await asyncio.gather(*long):
            rig.check(one)

    rig.run(main())


def test_a_killed_child_ends_every_open_request_and_later_calls(cramped_rig: Rig) -> None:
    rig = cramped_rig

    async def main() -> None:
        await rig.begin()
        long, short = rig.start_long(Sampling(max_new_tokens=200))
        await short
        os.kill(rig.engine._child.pid, signal.SIGKILL)
        outcomes = await asyncio.gather(*long, return_exceptions=True)
        lost = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        assert lost
        assert all(type(outcome) is ChildDied and "signal 9" in str(outcome) for outcome in lost)
        for call in (rig.engine.pause(Interruption.KEEP), rig.engine.health(), rig.write(rig.prompts[0], Sampling())):
            with pytest.raises(ChildDied, match="signal 9"):
                await call

    rig.run(main())


@pytest.mark.parametrize(("sampling", "named"), [
    (Sampling(repetition_penalty=1.1), r"sampling\.repetition_penalty"),
    (Sampling(presence_penalty=0.5), r"sampling\.presence_penalty"), (Sampling(frequency_penalty=0.5), r"sampling\.frequency_penalty"),
    (Sampling(min_new_tokens=2), r"sampling\.min_new_tokens"), (Sampling(stop=("x",)), r"sampling\.stop"),
])
def test_what_it_cannot_sample_is_refused_by_name(rig: Rig, sampling: Sampling, named: str) -> None:
    with pytest.raises(EngineError, match=named):
        rig.run(rig.write(rig.prompts[0], sampling))


def test_the_context_is_the_models_the_settings_or_the_caches(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 1024, "vocab_size": 16, "eos_token_id": 1}))

    def context_tokens(**settings: int) -> int:
        return TransformersEngine(tmp_path, **settings).capabilities.context_tokens

    assert context_tokens() == 1024
    assert context_tokens(context_tokens=100) == 100
    assert context_tokens(kv_cache_tokens=512) == 512
    with pytest.raises(ConfigError, match=r"context_tokens.*kv_cache_tokens"):
        context_tokens(context_tokens=600, kv_cache_tokens=512)
    with pytest.raises(ConfigError, match="at most the model's own 1024"):
        context_tokens(context_tokens=2000)


def test_a_child_that_says_what_nobody_understands_ends_every_open_request(model: PublishedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    class Confused:
        async def stream(self, op: str):
            yield Reply({"version": 0, "rows": "not rows"})

        async def call(self, op: str, *arguments: object, **settings: object) -> Reply:
            return Reply({})

        async def close(self, timeout_s: float) -> None:
            pass

    async def start(*arguments: object, **settings: object) -> Confused:
        return Confused()

    async def main() -> None:
        engine = TransformersEngine(model.folder)
        await engine.start(model.paths)
        with pytest.raises(ChildDied, match="out of step"):
            async for _ in engine.generate(GenerationRequest("r", np.array([3, 4], np.int32), Sampling(max_new_tokens=3), seed=0)):
                pass
        await engine.close()

    monkeypatch.setattr(Child, "start", start)
    asyncio.run(asyncio.wait_for(main(), 10))


def test_a_version_of_transformers_it_was_not_tested_with_is_refused(model: PublishedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = (Path(__file__).parents[2] / "constraints.txt").read_text()
    assert f"transformers=={TESTED_TRANSFORMERS}" in pinned
    monkeypatch.setattr("importlib.metadata.version", lambda name: "6.0.0")
    with pytest.raises(ConfigError, match=r"transformers 6\.0\.0.*or choose the inline engine"):
        TransformersEngine(model.folder)


def test_the_controllers_side_needs_no_torch() -> None:
    modules = "asyncrl.rollout.transformers_engine, asyncrl.rollout.inline_engine, asyncrl.rollout.config, asyncrl.rollout.fake_engine"
    check = f"import sys, {modules}; sys.exit(bool({{'torch', 'transformers'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", check], check=False, timeout=60).returncode == 0


def _rigs(model: PublishedModel, **settings: int) -> Iterator[Rig]:
    with asyncio.Runner() as runner:
        engine = TransformersEngine(model.folder, **settings)
        runner.run(engine.start(model.paths))
        yield Rig(engine, runner.run, model.manifest, model.truth, EOS_TOKENS, prompts(16), distributions=model.distributions)
        runner.run(engine.close())
