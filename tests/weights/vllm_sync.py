"""The engine of `test_vllm_sync`: one vLLM model, synced from a transformers model; prints what it saw as JSON.

Run as FOLDER ARCHITECTURE TIED DTYPE RANKS UNROUTED. With one rank it is in this process. Without the plugin's variable it only prepares.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.layers import utils
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from asyncrl.weights.ends import TransportSpec
from asyncrl.weights.engine_ranks import EngineRanks
from asyncrl.weights.manifest import Manifest, merge
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.receiver import joined
from asyncrl.weights.routed_target import RoutedTarget
from asyncrl.weights.store import StoreTransport
from asyncrl.weights.torch_pieces import local_bits, local_pieces
from asyncrl.weights.vllm_plugin import EXTENSION, VARIABLE
from tests.tiny_model import make_tiny_model

DENSITIES = (0.0, 0.002, 0.3, 1.0, 0.05, 0.5, 0.01, 0.2, 0.001, 0.9, 0.03, 1.0, 0.004, 0.06, 0.4, 0.002, 0.1, 0.0, 0.7, 0.02)
"""Of 20 deltas, from nothing to everything: each of the three encodings several times."""
MISSED = {7, 8}
"""Versions the engine is not told of: it comes to version 9 in one update."""
PROMPT = [2, 12, 3, 14]


class Trained:
    """A transformers model that changes at random, and its publisher."""

    def __init__(self, folder: Path, *, store: Path, dtype: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._dtype = dtype
        self._generator = torch.Generator().manual_seed(0)
        self._store = StoreTransport(store)
        self._publisher = Publisher(local_pieces(self.model, rank=0, dtype=dtype), rank=0, sink=self._store)

    def change(self, density: float) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                chosen = torch.rand(parameter.shape, generator=self._generator) < density
                parameter.add_(torch.randn(parameter.shape, generator=self._generator) * 0.1 * chosen)

    def publish(self, version: int, *, base: int | None) -> Manifest:
        publication = self._publisher.publish(local_bits(self.model, rank=0, dtype=self._dtype), version=version, base=base)
        manifest = merge([publication], run_epoch=0, version=version, base=base)
        self._store.commit(manifest)
        self._publisher.committed(version)
        return manifest

    def manifest(self, version: int) -> Manifest:
        return self._store.manifest(version)

    def anchor(self) -> Manifest:
        manifest = merge([self._publisher.anchor()], run_epoch=0, version=self._publisher.version, base=None)
        self._store.commit(manifest)
        return manifest

    def save(self, folder: Path) -> Path:
        """The published values, as a folder to load."""
        self.model.to(getattr(torch, self._dtype)).save_pretrained(folder)
        return folder


class Engine:
    """vLLM, and what its workers answer."""

    def __init__(self, folder: Path, *, dtype: str, ranks: int) -> None:
        self._llm = LLM(str(folder), dtype=dtype, enforce_eager=True, max_model_len=64, skip_tokenizer_init=True, seed=0,
                        enable_prefix_caching=False, worker_extension_cls=EXTENSION, disable_log_stats=True, tensor_parallel_size=ranks)
        self._ranks = EngineRanks(self._ask)

    async def _ask(self, method: str, arguments: tuple[Any, ...]) -> list[dict[str, Any]]:
        return self._llm.collective_rpc(method, args=arguments)

    def on_each(self, work: str | Callable[..., Any], *arguments: Any) -> list[Any]:
        return self._llm.collective_rpc(work, args=arguments)

    def prepare(self, folder: Path, *, transport: dict[str, Any]) -> dict[str, Any]:
        return attempt(self._ranks.prepare(str(folder), transport=transport))

    def fetch(self, manifest: Manifest) -> dict[str, Any]:
        return attempt(self._ranks.fetch(manifest))

    def apply(self, manifest: Manifest) -> dict[str, Any]:
        return attempt(self._ranks.apply(manifest))

    def states(self) -> list[dict[str, Any]]:
        return self._llm.collective_rpc("asyncrl_state")

    def checksums(self) -> list[dict[str, str]]:
        return self._llm.collective_rpc("compute_weight_checksums")

    def audit(self) -> int:
        return joined(self.on_each(lambda worker: worker.asyncrl_sync.receiver.audit()))

    def tied(self) -> bool:
        return all(self.on_each(shares_the_head))

    def greedy(self) -> list[Any]:
        sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2, detokenize=False)
        (output,) = self._llm.generate([{"prompt_token_ids": PROMPT}], sampling, use_tqdm=False)
        return [{token: found.logprob for token, found in step.items()} for step in output.outputs[0].logprobs]

    def close(self) -> None:
        del self._llm
        gc.collect()
        cleanup_dist_env_and_memory()


def attempt(work: Coroutine[Any, Any, Any]) -> dict[str, Any]:
    """What came of it; of an error, its class and message."""
    try:
        found = asyncio.run(work)
    except Exception as error:
        return {"kind": type(error).__name__, "message": str(error)}
    return found if isinstance(found, dict) else {"state_hash": found}


def tear(worker: Any, number: int) -> None:
    """On the last rank let the writes before the `number`-th happen, and no later one."""
    if worker.rank == worker.vllm_config.parallel_config.tensor_parallel_size - 1:
        worker.whole_write, calls = RoutedTarget.write, []

        def torn(target: RoutedTarget, entry: Any, changes: Any) -> None:
            calls.append(target.name)
            if len(calls) == number:
                raise MemoryError(f"torn at {target.name}")
            worker.whole_write(target, entry, changes)
        RoutedTarget.write = torn


def mend(worker: Any) -> None:
    RoutedTarget.write = getattr(worker, "whole_write", RoutedTarget.write)


def shares_the_head(worker: Any) -> bool:
    model = worker.model_runner.get_model()
    return model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def compute_on_the_way(worker: Any) -> None:
    """Let the loader of a norm and of a sharded projection clone what it is given, as one that computes with it does."""
    model = worker.model_runner.get_model().model
    for parameter in (model.norm.weight, model.layers[0].self_attn.o_proj.weight):
        load = getattr(parameter, "weight_loader", default_weight_loader)
        changed = partial(lambda load, parameter, loaded, *more: load(parameter, loaded.clone(), *more), load)
        setattr(parameter, "_weight_loader" if hasattr(parameter, "_weight_loader") else "weight_loader", changed)


def packs_small_weights() -> bool:
    """Whether vLLM would pack small weights on a CPU with matrix tiles."""
    with patch.object(torch.cpu, "_is_amx_tile_supported", lambda: True):
        return utils.check_cpu_sgl_kernel(32, 32, torch.bfloat16)


def synced(engine: Engine, trained: Trained, root: Path) -> dict[str, Any]:
    transport = TransportSpec(folder=root / "store").to_wire()
    manifests = [trained.publish(0, base=None)]
    seen: dict[str, Any] = {"unprepared": engine.apply(manifests[0]), "first": engine.states(), "tied": engine.tied(),
                            "before": engine.greedy()}
    loaded = engine.checksums()
    seen["prepared"] = engine.prepare(root / "base", transport=transport)
    seen["recording_changed"] = engine.checksums() != loaded
    seen["applied"] = [engine.apply(manifests[0]) | {"audit": engine.audit()}]
    for version, density in enumerate(DENSITIES, start=1):
        trained.change(density)
        manifests.append(trained.publish(version, base=version - 1))
        if version not in MISSED:
            seen["applied"].append(engine.apply(manifests[-1]) | {"audit": engine.audit()})
    seen["published"] = [manifest.state_hash for version, manifest in enumerate(manifests) if version not in MISSED]
    seen["modes"] = sorted({entry.mode for manifest in manifests for entry in manifest.tensors})
    return seen | failed(engine, trained) | {"checksums": engine.checksums(), "greedy": engine.greedy()}


def failed(engine: Engine, trained: Trained) -> dict[str, Any]:
    """An update from a wrong base, and one that fails half-way on one rank; an anchor and a delta heal the engine."""
    seen: dict[str, Any] = {}
    held, last = engine.checksums(), len(DENSITIES)
    seen["wrong_base"] = engine.apply(dataclasses.replace(trained.manifest(last), version=last + 1, base=last + 7))
    seen["wrong_base_changed"] = engine.checksums() != held
    trained.change(0.1)
    manifest = trained.publish(last + 1, base=last)
    seen |= beside_generation(engine, manifest)
    seen["fetched"] = engine.fetch(manifest)
    seen["fetch_changed"] = engine.checksums() != held
    engine.on_each(tear, 5)
    seen["torn"] = engine.apply(manifest)
    engine.on_each(mend)
    seen["torn_changed"] = engine.checksums()[-1] != held[-1]
    seen["poisoned"] = engine.states()
    seen["healed"] = engine.apply(trained.anchor())
    trained.change(0.05)
    final = trained.publish(last + 2, base=last + 1)
    return seen | {"last": engine.apply(final) | {"published": final.state_hash, "audit": engine.audit()}, "states": engine.states()}


def beside_generation(engine: Engine, manifest: Manifest) -> dict[str, Any]:
    """Sample from beginning to end while every rank's fetch waits for bytes that do not come; then they come."""
    engine.on_each(withhold_parts)
    begun = engine.on_each("asyncrl_fetch", manifest.to_json())
    before = engine.on_each("asyncrl_fetched", manifest.to_json())
    tokens = len(engine.greedy())
    after = engine.on_each("asyncrl_fetched", manifest.to_json())
    engine.on_each(give_parts)
    return {"begun": begun, "tokens_beside": tokens, "shares_beside": [answer["shares"] for answer in before + after]}


def withhold_parts(worker: Any) -> None:
    source, worker.given = worker.asyncrl_sync.receiver._source, threading.Event()
    parts = source.parts
    source.parts = lambda manifest: worker.given.wait(60) and parts(manifest)


def give_parts(worker: Any) -> None:
    del worker.asyncrl_sync.receiver._source.parts
    worker.given.set()


def main() -> None:
    root, architecture, tie, dtype = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "tied", sys.argv[4]
    ranks, unrouted = int(sys.argv[5]), sys.argv[6] == "unrouted"
    base = make_tiny_model(root / "base", architecture=architecture, tie=tie, hidden=128)
    transport = TransportSpec(folder=root / "store").to_wire()
    trained = Trained(base, store=root / "store", dtype="bfloat16")
    engine = Engine(base, dtype=dtype, ranks=ranks)
    if VARIABLE not in os.environ:
        print("\n" + json.dumps({"prepared": engine.prepare(base, transport=transport), "packs_small_weights": packs_small_weights()}))
        return
    if unrouted:
        engine.on_each(compute_on_the_way)
    seen = synced(engine, trained, root) | {"packs_small_weights": packs_small_weights()}
    engine.close()
    fresh = Engine(trained.save(root / "final"), dtype=dtype, ranks=ranks)
    seen["fresh_checksums"] = fresh.checksums()
    seen["fresh_greedy"] = fresh.greedy()
    seen["other_folder"] = fresh.prepare(base, transport=transport)
    seen["own_folder"] = fresh.prepare(root / "final", transport=transport)
    print("\n" + json.dumps(seen), flush=True)
    fresh.close()


if __name__ == "__main__":
    main()
