"""The engine of `test_vllm_sync`: one vLLM model in this process, synced from a transformers model; prints what it saw as JSON.

Run as FOLDER ARCHITECTURE TIED DTYPE. Without the plugin's variable it only prepares.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.layers import utils

from asyncrl.weights.ends import TransportSpec
from asyncrl.weights.manifest import Manifest, merge
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.receiver import joined
from asyncrl.weights.routed_target import RoutedTarget
from asyncrl.weights.store import StoreTransport
from asyncrl.weights.torch_pieces import local_bits, local_pieces
from asyncrl.weights.vllm_plugin import EXTENSION, VARIABLE
from tests.tiny_model import make_tiny_model

DENSITIES = (0.0, 0.002, 0.3, 1.0)
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

    def anchor(self) -> Manifest:
        manifest = merge([self._publisher.anchor()], run_epoch=0, version=self._publisher.version, base=None)
        self._store.commit(manifest)
        return manifest

    def save(self, folder: Path) -> Path:
        """The published values, as a folder to load."""
        self.model.to(getattr(torch, self._dtype)).save_pretrained(folder)
        return folder


class Engine:
    """vLLM in this process, and what its one worker answers."""

    def __init__(self, folder: Path, *, dtype: str) -> None:
        self._llm = LLM(str(folder), dtype=dtype, enforce_eager=True, max_model_len=64, skip_tokenizer_init=True, seed=0,
                        enable_prefix_caching=False, worker_extension_cls=EXTENSION, disable_log_stats=True)

    def ask(self, method: str, *args: str) -> Any:
        (answer,) = self._llm.collective_rpc(method, args=args)
        return answer

    def audit(self) -> int:
        (found,) = self._llm.collective_rpc(lambda worker: worker.asyncrl_receiver.audit())
        return joined([found])

    def tied(self) -> bool:
        model = self._llm.apply_model(lambda model: model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr())
        return model[0]

    def greedy(self) -> list[Any]:
        sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2, detokenize=False)
        (output,) = self._llm.generate([{"prompt_token_ids": PROMPT}], sampling, use_tqdm=False)
        return [{token: found.logprob for token, found in step.items()} for step in output.outputs[0].logprobs]

    def close(self) -> None:
        del self._llm
        gc.collect()
        cleanup_dist_env_and_memory()


def failing_at(number: int) -> Any:
    """Let the writes before the `number`-th happen."""
    write, calls = RoutedTarget.write, []

    def torn(target: RoutedTarget, entry: Any, changes: Any) -> None:
        calls.append(target.name)
        if len(calls) == number:
            raise MemoryError(f"torn at {target.name}")
        write(target, entry, changes)
    return patch.object(RoutedTarget, "write", torn)


def packs_small_weights() -> bool:
    """Whether vLLM would pack small weights on a CPU with matrix tiles."""
    with patch.object(torch.cpu, "_is_amx_tile_supported", lambda: True):
        return utils.check_cpu_sgl_kernel(32, 32, torch.bfloat16)


def without_traceback(answer: dict[str, Any]) -> dict[str, Any]:
    return {key: answer["error"][key] for key in ("kind", "message")} if "error" in answer else answer


def synced(engine: Engine, trained: Trained, root: Path) -> dict[str, Any]:
    seen: dict[str, Any] = {"unprepared": without_traceback(engine.ask("asyncrl_apply", "{}")), "first": engine.ask("asyncrl_state"),
                            "tied": engine.tied(), "before": engine.greedy()}
    loaded = engine.ask("compute_weight_checksums")
    seen["prepared"] = engine.ask("asyncrl_prepare", str(root / "base"), TransportSpec(root / "store").to_wire())
    seen["recording_changed"] = engine.ask("compute_weight_checksums") != loaded
    manifests = [trained.publish(0, base=None)]
    for version, density in enumerate(DENSITIES, start=1):
        trained.change(density)
        manifests.append(trained.publish(version, base=version - 1))
    held = engine.ask("compute_weight_checksums")
    seen["no_anchor"] = without_traceback(engine.ask("asyncrl_apply", manifests[1].to_json()))
    seen["applied"] = [engine.ask("asyncrl_apply", manifest.to_json()) | {"audit": engine.audit()} for manifest in manifests[:-1]]
    seen["published"] = [manifest.state_hash for manifest in manifests]
    trained.change(0.1)
    ahead = trained.publish(len(manifests), base=len(manifests) - 1)
    between = engine.ask("compute_weight_checksums")
    seen["wrong_base"] = without_traceback(engine.ask("asyncrl_apply", ahead.to_json()))
    seen["wrong_base_changed"] = engine.ask("compute_weight_checksums") != between
    seen["anything_changed"] = between != held
    with failing_at(5):
        seen["torn"] = without_traceback(engine.ask("asyncrl_apply", manifests[-1].to_json()))
    seen["torn_changed"] = engine.ask("compute_weight_checksums") != between
    seen["poisoned"] = engine.ask("asyncrl_state")
    seen["refused"] = without_traceback(engine.ask("asyncrl_apply", manifests[-1].to_json()))
    seen["healed"] = engine.ask("asyncrl_apply", trained.anchor().to_json())
    trained.change(0.05)
    last = trained.publish(ahead.version + 1, base=ahead.version)
    seen["last"] = engine.ask("asyncrl_apply", last.to_json()) | {"published": last.state_hash, "audit": engine.audit()}
    seen["state"] = engine.ask("asyncrl_state")
    return seen | {"checksums": engine.ask("compute_weight_checksums"), "greedy": engine.greedy()}


def main() -> None:
    root, architecture, tie, dtype = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "tied", sys.argv[4]
    base = make_tiny_model(root / "base", architecture=architecture, tie=tie, hidden=128)
    trained = Trained(base, store=root / "store", dtype="bfloat16")
    engine = Engine(base, dtype=dtype)
    if VARIABLE not in os.environ:
        answer = without_traceback(engine.ask("asyncrl_prepare", str(base), TransportSpec(root / "store").to_wire()))
        print("\n" + json.dumps({"prepared": answer, "packs_small_weights": packs_small_weights()}))
        return
    seen = synced(engine, trained, root) | {"packs_small_weights": packs_small_weights()}
    engine.close()
    fresh = Engine(trained.save(root / "final"), dtype=dtype)
    seen["fresh_checksums"] = fresh.ask("compute_weight_checksums")
    seen["fresh_greedy"] = fresh.greedy()
    seen["other_folder"] = without_traceback(fresh.ask("asyncrl_prepare", str(base), TransportSpec(root / "store").to_wire()))
    seen["own_folder"] = fresh.ask("asyncrl_prepare", str(root / "final"), TransportSpec(root / "store").to_wire())
    print("\n" + json.dumps(seen))


if __name__ == "__main__":
    main()
