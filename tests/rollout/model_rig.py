"""A tiny model in three published versions, and the logprobs its tokens must have, from plain forwards."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from asyncrl.adapters import add_adapters
from asyncrl.lora_config import LoRA
from asyncrl.paths import RunPaths
from asyncrl.records import joined
from asyncrl.weights.manifest import Manifest, merge
from asyncrl.weights.piece_bits import ArrayBits
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.store import StoreTransport
from asyncrl.weights.torch_pieces import PublishedDtype, bits_of, checkpoint_tensors, frozen_names, local_bits, local_pieces
from tests.rollout.engine_contract import Written
from tests.tiny_model import make_tiny_model

EOS_TOKENS = frozenset({1, 5})
VOCAB = 48


@dataclass(frozen=True)
class PublishedModel:
    """A model folder, and versions 0, 1, 2 in the store of `paths`, and a version 3 whose logits are NaN."""

    folder: Path
    paths: RunPaths
    versions: tuple[PreTrainedModel, ...]
    manifests: dict[tuple[int, int | None], Manifest]

    def manifest(self, version: int, base: int | None) -> Manifest:
        return self.manifests[version, base]

    def truth(self, written: Written) -> NDArray[np.float32]:
        """Logprobs of the written tokens, over the kept sets that were recorded of them."""
        logits = self._logits(written)
        kept = joined([(chunk.records, len(chunk.tokens)) for chunk in written.chunks]).kept
        for row, count, end in () if kept is None else zip(logits, kept.counts, kept.offsets[1:], strict=True):
            if count:
                row[np.setdiff1d(np.arange(len(row)), kept.ids[end - count:end])] = -torch.inf
        return torch.log_softmax(logits, dim=-1).gather(-1, torch.from_numpy(written.tokens).long()[:, None])[:, 0].numpy()

    def distributions(self, written: Written) -> NDArray[np.float64]:
        """[n, V] of the written tokens, before anything is left out."""
        return torch.softmax(self._logits(written).double(), dim=-1).numpy()

    @torch.no_grad()
    def experts(self, written: Written, version: int) -> NDArray[np.int16]:
        """[prompt + n − 1, L, k] where a version's own forward sends the tokens."""
        tokens = torch.tensor([[*written.prompt.tolist(), *written.tokens.tolist()[:-1]]])
        found = []
        for layer in self.versions[version].model.layers:
            layer.mlp.gate.register_forward_hook(lambda _, __, output: found.append(output[2]))
        self.versions[version](tokens)
        for layer in self.versions[version].model.layers:
            layer.mlp.gate._forward_hooks.clear()
        return torch.stack(found, dim=1).numpy().astype(np.int16)

    @torch.no_grad()
    def _logits(self, written: Written) -> Tensor:
        """[n, V] over temperature: each under the weights of its version, over fresh keys or over those of older versions."""
        tokens = torch.tensor([[*written.prompt.tolist(), *written.tokens.tolist()]])
        found, read, end = [], 0, len(written.prompt)
        cache = DynamicCache()
        for count, version, fresh in written.spans:
            if fresh:
                cache, read = DynamicCache(), 0
            # the newest token has no keys yet: whoever samples its successor computes them
            end += count
            positions = torch.arange(read, end - 1)[None]
            logits = self.versions[version](tokens[:, read:end - 1], past_key_values=cache, position_ids=positions).logits[0, -count:]
            found.append(logits.float() / written.sampling.temperature)
            read = end - 1
        return torch.cat(found)


def publish_model(root: Path, *, dtype: PublishedDtype = "float32", lora: LoRA | None = None,
                  make: Callable[..., Path] = make_tiny_model, **made: Any) -> PublishedModel:
    """A model whose own generation config would bend the distribution and names one of its two end tokens.

    Published in `dtype`; with `lora` the versions differ in their adapters; `made` goes to `make`.
    Attention heads have 32 elements, the least that vLLM serves on a CPU.
    """
    torch.set_num_threads(1)  # more threads only get in each other's way on a model of this size
    folder = make(root / "model", vocab=VOCAB, hidden=128, **made)
    (folder / "generation_config.json").write_text(json.dumps(
        {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1, "eos_token_id": [5]}))
    paths = RunPaths(root / "run", root / "shared")
    paths.make()
    store = StoreTransport(paths.weights)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if lora:
        add_adapters(model, lora)
    frozen = frozen_names(model)
    publisher = Publisher(local_pieces(model, rank=0, dtype=dtype), rank=0, sink=store, frozen=frozen)
    versions, manifests = [], {}
    generator = torch.Generator().manual_seed(3)
    for version in range(3):
        base = version - 1 if version else None
        if version:
            _change(model, generator)
        bits = local_bits(model, rank=0, dtype=dtype, but=frozen if version else ())
        publication = publisher.publish(bits, version=version, base=base)
        manifests[version, base] = merge([publication], run_epoch=0, version=version, base=base)
        store.commit(manifests[version, base])
        publisher.committed(version)
        versions.append(copy.deepcopy(model).eval())
    anchors = Publisher(local_pieces(model, rank=0, dtype=dtype), rank=0, sink=store)
    publication = anchors.publish(local_bits(model, rank=0, dtype=dtype), version=2, base=None)
    manifests[2, None] = merge([publication], run_epoch=0, version=2, base=None)
    broken = [parameter for parameter in model.model.parameters() if parameter.requires_grad][-1]
    broken.data.view(-1)[0] = torch.nan
    bits = [(piece, bits_of(tensor.to(getattr(torch, dtype)))) for piece, tensor in
            zip(local_pieces(model, rank=0, dtype=dtype), checkpoint_tensors(model).values(), strict=True) if piece.name not in frozen]
    manifests[3, 2] = merge([publisher.publish(ArrayBits(bits), version=3, base=2)], run_epoch=0, version=3, base=2)
    return PublishedModel(folder, paths, tuple(versions), manifests)


def prompts(count: int) -> list[NDArray[np.int32]]:
    """Prompts of 3 to 9 tokens, none of them an end."""
    random = np.random.default_rng(0)
    return [random.integers(6, VOCAB, size=3 + index % 7).astype(np.int32) for index in range(count)]


@torch.no_grad()
def _change(model: PreTrainedModel, generator: torch.Generator) -> None:
    for parameter in (parameter for parameter in model.parameters() if parameter.requires_grad):
        chosen = torch.rand(parameter.shape, generator=generator) < 0.2
        parameter.add_(chosen * torch.randn(parameter.shape, generator=generator) * 0.1)
