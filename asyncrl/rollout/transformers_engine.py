"""Hugging Face continuous batching in a child process; this is the controller's side, without torch."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.lora_config import read_lora
from asyncrl.rollout.child_engine import ChildEngine, Launch
from asyncrl.rollout.config import TransformersEngineConfig
from asyncrl.rollout.model_files import ModelFacts, read_facts
from asyncrl.settings import validated

TESTED_TRANSFORMERS = "5.19."
"""What the version must begin with: the engine stands on continuous batching, which has no stable interface."""


class TransformersEngine(ChildEngine):
    """Continuous batching in a child process. `settings` are the fields of `TransformersEngineConfig`, `lora` is what the trainer has.

    Raises ConfigError, also with a transformers it was not tested with.
    """

    def __init__(self, model: str | Path, *, name: str = "engine-0", lora: Any = "none", **settings: Any) -> None:
        require_transformers()
        adapters = read_lora(lora)
        config = validated(TransformersEngineConfig, settings, name="engine")
        facts = _facts(model, config)
        limits = {"max_batch_tokens": config.max_batch_tokens, "max_running_requests": config.max_running_requests,
                  "kv_cache_tokens": config.kv_cache_tokens}
        spec = {"folder": str(facts.folder.absolute()), "dtype": config.dtype, "threads": config.threads, "seed": config.seed or 0,
                "eos_tokens": sorted(facts.eos_tokens), "limits": limits, "lora": adapters and adapters.model_dump(),
                "has_experts": facts.has_experts}
        capabilities = config.capabilities(context_tokens=facts.context_tokens).serving(adapters)
        super().__init__(name, capabilities=capabilities, facts=facts, launch=Launch(
            "asyncrl.rollout.transformers_child", spec, {"OMP_NUM_THREADS": str(config.threads)}))


def require_transformers() -> None:
    """Raise ConfigError without transformers, or with one this engine was not tested with. Imports nothing."""
    try:
        installed = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        installed = "not installed"
    if not installed.startswith(TESTED_TRANSFORMERS):
        raise ConfigError("engine.kind", value=f"transformers {installed}", allowed=f"transformers {TESTED_TRANSFORMERS}x with this engine",
                          remedy="pip install -c constraints.txt transformers, or choose the inline engine.")


def _facts(model: str | Path, config: TransformersEngineConfig) -> ModelFacts:
    """The model's limits; the context is no longer than the key-value cache."""
    facts = read_facts(model, context_tokens=config.context_tokens)
    return dataclasses.replace(facts, context_tokens=min(facts.context_tokens, config.kv_cache_tokens))
