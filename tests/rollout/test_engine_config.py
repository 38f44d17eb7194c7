"""Settings of sampling and engines."""

from __future__ import annotations

import dataclasses

import pytest
from pydantic import TypeAdapter, ValidationError

from asyncrl.rollout.config import EngineConfig, InlineEngineConfig, SamplingConfig, TransformersEngineConfig, VLLMEngineConfig
from asyncrl.types import Sampling


def test_sampling_settings_have_the_fields_and_defaults_of_sampling() -> None:
    assert list(SamplingConfig.model_fields) == [field.name for field in dataclasses.fields(Sampling)]
    assert SamplingConfig().build() == Sampling()
    changed = {"temperature": 0.7, "max_new_tokens": 9, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "min_new_tokens": 2,
               "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3, "stop": ("x",)}
    assert SamplingConfig(**changed).build() == Sampling(**changed)


def test_the_kind_selects_the_engine_and_its_fields_alone() -> None:
    parse = TypeAdapter(EngineConfig).validate_python
    assert isinstance(parse({"kind": "inline", "max_batch_requests": 8}), InlineEngineConfig)
    assert isinstance(parse({"kind": "transformers", "threads": 2}), TransformersEngineConfig)
    assert isinstance(parse({"kind": "vllm", "kv_cache_bytes": 2**22}), VLLMEngineConfig)
    for wrong in ({"kind": "inline", "kv_cache_tokens": 9}, {"kind": "transformers", "max_batch_requests": 8}, {"kind": "sglang"},
                  {"kind": "vllm", "kv_cache_tokens": 9}):
        with pytest.raises(ValidationError):
            parse(wrong)


@pytest.mark.parametrize("wrong", [{"threads": 0}, {"max_batch_tokens": 0}, {"max_running_requests": 0}, {"kv_cache_tokens": -1},
                                   {"context_tokens": 1}, {"dtype": "int8"}])
def test_values_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        TransformersEngineConfig(**wrong)
