"""Engines that serve adapters keep the same contract: of each version, every token has the logprob that the merged policy gives it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import ConfigError, WeightSyncError
from asyncrl.lora_config import NO_LORA, LoRA
from asyncrl.rollout.config import VLLMEngineConfig
from asyncrl.rollout.engine import Engine, Interruption, require, require_adapters
from asyncrl.rollout.fake_engine import FakeEngine
from asyncrl.rollout.inline_engine import InlineEngine
from asyncrl.rollout.transformers_engine import TransformersEngine
from asyncrl.rollout.vllm_engine import VLLMEngine
from asyncrl.types import Sampling
from tests.rollout import engine_contract, start_contract
from tests.rollout.engine_contract import Rig
from tests.rollout.model_rig import EOS_TOKENS, PublishedModel, prompts, publish_model

ADAPTERS = LoRA(rank=4, targets=("q_proj", "v_proj", "o_proj", "down_proj", "gate_proj"))
EVERY_RULE = [*engine_contract.RULES, *engine_contract.MODEL_RULES]
KEEPING = {engine_contract.keep_goes_on_with_old_keys_and_says_so, engine_contract.recompute_makes_kept_keys_fresh_again,
           engine_contract.weights_that_break_the_logits_end_requests_without_a_made_up_logprob}
"""Rules of requests that go on under a version that came while they were running."""
ACROSS_VERSIONS = engine_contract.every_token_over_three_versions_has_the_logprob_of_its_own


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PublishedModel:
    return publish_model(tmp_path_factory.mktemp("adapters"), lora=ADAPTERS)


@contextlib.contextmanager
def started(make: Any, model: PublishedModel, **settings: Any) -> Iterator[Rig]:
    with asyncio.Runner() as runner:
        engine: Engine = make(model.folder, lora=ADAPTERS, **settings)
        try:
            runner.run(engine.start(model.paths))
            yield Rig(engine, runner.run, model.manifest, model.truth, EOS_TOKENS, prompts(16))
        finally:
            runner.run(engine.close())


@pytest.fixture
def inline(model: PublishedModel) -> Iterator[Rig]:
    with started(InlineEngine, model) as rig:
        yield rig


@pytest.fixture(scope="module")
def transformers(model: PublishedModel) -> Iterator[Rig]:
    with started(TransformersEngine, model, max_running_requests=16) as rig:
        yield rig


@pytest.fixture(scope="module")
def vllm(model: PublishedModel) -> Iterator[Rig]:
    with started(VLLMEngine, model, kv_cache_bytes=2**26) as rig:
        yield rig


@pytest.mark.parametrize("rule", EVERY_RULE, ids=lambda rule: rule.__name__)
def test_the_inline_engine_keeps_the_contract(inline: Rig, rule) -> None:
    inline.run(rule(inline))


@pytest.mark.slow
@pytest.mark.parametrize("rule", EVERY_RULE, ids=lambda rule: rule.__name__)
def test_the_transformers_engine_keeps_the_contract(transformers: Rig, rule) -> None:
    transformers.run(rule(transformers))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Interruption.KEEP, Interruption.RECOMPUTE])
def test_every_token_of_the_transformers_engine_has_the_logprob_of_its_version(transformers: Rig, kind: Interruption) -> None:
    transformers.run(ACROSS_VERSIONS(transformers, kind))


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_samples_nothing_before_an_anchor(vllm: Rig) -> None:
    vllm.run(start_contract.an_engine_without_a_version_does_not_sample(vllm.engine))


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("rule", [rule for rule in EVERY_RULE if rule not in KEEPING], ids=lambda rule: rule.__name__)
def test_vllm_keeps_the_contract(vllm: Rig, rule) -> None:
    vllm.run(rule(vllm))


@pytest.mark.vllm
@pytest.mark.slow
def test_every_token_of_vllm_has_the_logprob_of_its_version(vllm: Rig) -> None:
    vllm.run(ACROSS_VERSIONS(vllm, Interruption.RECOMPUTE))


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_has_one_adapter_of_a_name_for_each_version(vllm: Rig, model: PublishedModel) -> None:
    """A name that came again would find the keys of the older version; one that stayed would take up memory."""
    places = model.paths.shared

    async def main() -> list[list[str]]:
        await vllm.begin()
        seen = []
        for version in (1, 2):
            await vllm.update(version, version - 1, Interruption.RECOMPUTE)
            seen.append([folder.name for folder in places.glob("adapters-*/*")])
        return seen

    assert vllm.run(main()) == [[f"{vllm.epoch}.1"], [f"{vllm.epoch}.2"]]


@pytest.mark.vllm
@pytest.mark.slow
def test_no_request_of_vllm_goes_on_with_adapters_of_another_version(vllm: Rig) -> None:
    async def main() -> None:
        await vllm.begin()
        long, short = vllm.start_long(Sampling(max_new_tokens=120))
        await short
        await vllm.engine.pause(Interruption.KEEP)
        with pytest.raises(WeightSyncError, match="keeps the adapters it began with"):
            await vllm.apply(1, 0)
        await vllm.engine.resume()
        for one in await asyncio.gather(*long):
            vllm.check(one)
            assert {version for _, version, _ in one.spans} == {0}

    vllm.run(main())


def test_an_engine_without_the_trainers_adapters_is_refused(model: PublishedModel, tmp_path: Path) -> None:
    plain, adapted = InlineEngine(model.folder), InlineEngine(model.folder, lora=ADAPTERS)
    require_adapters(adapted.capabilities, ADAPTERS, engine="inline")
    require_adapters(adapted.capabilities, ADAPTERS.model_copy(update={"seed": 7, "export_adapters": True}), engine="inline")
    for engine, trained in ((plain, ADAPTERS), (adapted, NO_LORA), (adapted, ADAPTERS.model_copy(update={"rank": 8}))):
        with pytest.raises(ConfigError, match=r"lora, engine\.lora"):
            require_adapters(engine.capabilities, trained, engine="inline")


def test_an_engine_that_has_no_adapters_at_all_is_refused(model: PublishedModel) -> None:
    with pytest.raises(ConfigError, match=r"lora\.kind, engine\.kind"):
        require_adapters(FakeEngine().capabilities, ADAPTERS, engine="fake")


def test_what_was_published_for_other_layers_is_refused(model: PublishedModel) -> None:
    """A script that forgets to tell the engine, or tells it something else, hears of it before anything is written."""
    for lora, reason in (("none", "the runtime model has no tensor"), (ADAPTERS.model_copy(update={"rank": 2}), "was published with shape"),
                         (LoRA(rank=4), "leaves .* tensors unset")):
        engine = InlineEngine(model.folder, lora=lora)

        async def main(engine: InlineEngine = engine) -> None:
            await engine.start(model.paths)
            try:
                await engine.apply(model.manifest(0, None))
            finally:
                await engine.close()

        with pytest.raises(WeightSyncError, match=reason):
            asyncio.run(main())


@pytest.mark.parametrize("kind", list(Interruption))
def test_vllm_cannot_keep_requests_over_a_change_of_adapters(kind: Interruption) -> None:
    capabilities = VLLMEngineConfig().capabilities(context_tokens=64).serving(ADAPTERS)
    if kind is Interruption.KEEP:
        with pytest.raises(ConfigError, match=r"weights\.interruption, lora\.kind"):
            require(capabilities, Sampling(), kind, engine="vllm")
    else:
        require(capabilities, Sampling(), kind, engine="vllm")
    require(VLLMEngineConfig().capabilities(context_tokens=64), Sampling(), kind, engine="vllm")
