"""Engines of a mixture of experts record where each token went."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from asyncrl.errors import EngineError
from asyncrl.records import Wanted
from asyncrl.rollout.engine import GenerationRequest, Interruption
from asyncrl.rollout.inline_engine import InlineEngine
from asyncrl.rollout.pending_records import PendingRecords
from asyncrl.rollout.transformers_engine import TransformersEngine
from asyncrl.types import Sampling
from tests.rollout import records_contract
from tests.rollout.engine_contract import Rig
from tests.rollout.model_rig import EOS_TOKENS, PublishedModel, prompts, publish_model
from tests.tiny_model import make_tiny_model
from tests.tiny_moe import CHOSEN, LAYERS, make_tiny_moe


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PublishedModel:
    return publish_model(tmp_path_factory.mktemp("moe"), make=make_tiny_moe)


@pytest.fixture(scope="module", params=["inline", "transformers", "transformers, prompts in pieces, a small cache"])
def rig(model: PublishedModel, request: pytest.FixtureRequest) -> Iterator[Rig]:
    settings = {"inline": {}, "transformers": {"max_running_requests": 16}}.get(
        request.param, {"kv_cache_tokens": 256, "max_running_requests": 12, "max_batch_tokens": 16})
    engine = (InlineEngine if request.param == "inline" else TransformersEngine)(model.folder, **settings)
    with asyncio.Runner() as runner:
        runner.run(engine.start(model.paths))
        yield Rig(engine, runner.run, model.manifest, model.truth, EOS_TOKENS, prompts(8), experts=model.experts)
        runner.run(engine.close())


def test_experts_are_those_of_a_forward_under_the_stamped_version(rig: Rig) -> None:
    rig.run(records_contract.experts_are_those_of_a_forward_under_the_stamped_version(rig))


@pytest.mark.parametrize("kind", [Interruption.KEEP, Interruption.RECOMPUTE])
def test_experts_are_recorded_over_an_interruption(rig: Rig, kind: Interruption) -> None:
    rig.run(records_contract.experts_are_recorded_over_an_interruption(rig, kind))


def test_nothing_is_recorded_that_was_not_wanted(rig: Rig) -> None:
    rig.run(records_contract.nothing_is_recorded_that_was_not_wanted(rig))


def test_experts_of_a_dense_model_are_refused(tmp_path: Path) -> None:
    engine = InlineEngine(make_tiny_model(tmp_path))

    async def main() -> None:
        with pytest.raises(EngineError, match="routed experts are wanted"):
            await anext(engine.generate(GenerationRequest("one", np.array([3], np.int32), Sampling(), seed=0,
                                                          wanted=Wanted(routed_experts=True))))

    asyncio.run(main())


def test_a_chunk_ends_with_the_token_before_its_last() -> None:
    pending = PendingRecords(Wanted(routed_experts=True), prompt_tokens=3)
    rows = np.arange(8, dtype=np.int16)[:, None, None] + np.zeros((1, LAYERS, CHOSEN), np.int16)
    pending.passed(rows[:2], start=0)
    pending.passed(rows[2:3], start=2)
    pending.passed(rows[3:5], start=3)
    assert pending.take(0).experts is None
    assert pending.take(2).experts[:, 0, 0].tolist() == [0, 1, 2, 3]
    pending.passed(rows[:6] + 90, start=0)
    assert pending.take(1).experts[:, 0, 0].tolist() == [4]
    assert pending.take(1).experts[:, 0, 0].tolist() == [95], "what passes again has its first record"
