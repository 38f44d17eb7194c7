"""Ways to bring a trainer's new weights into an engine: what each does on the trainer's side, before the pause, and within it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from asyncrl.weights.base_proof import prove_base, saved_tensors
from asyncrl.weights.codec import Changes
from asyncrl.weights.manifest import Manifest, TensorEntry, merge
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.receiver import Receiver
from asyncrl.weights.routed_target import RoutedTarget
from asyncrl.weights.routes import record_routes
from asyncrl.weights.store import StoreTransport
from asyncrl.weights.torch_pieces import bits_of, checkpoint_tensors, local_bits, local_pieces
from benchmarks.weight_sync_gather import Ranks

INDICES, VALUES = ".indices", ".values"


class Way(Protocol):
    """One contestant. Each step is timed by itself; a way that sends no file has nothing to fetch."""

    def prepare(self) -> None:
        """What is not measured."""

    def publish(self) -> int:
        """On the trainer: everything until the bytes are where an engine finds them. How many they are."""

    def fetch(self) -> None:
        """On the engine, before the pause."""

    def apply(self) -> None:
        """On the engine, in the pause."""


class Delta:
    """Ours: detection, blk16 and its kin, manifest; then verified, written, read back."""

    def __init__(self, trained: nn.Module, receiver: Receiver, *, store: StoreTransport, threads: int) -> None:
        self._trained, self.receiver, self._store = trained, receiver, store
        self._publisher = Publisher(local_pieces(trained, rank=0, dtype="bfloat16"), rank=0, sink=store, threads=threads)
        self.manifest: Manifest
        self._publish(base=None)
        receiver.apply(self.manifest)

    def prepare(self) -> None:
        """What engines need no more is deleted, as a run does after an update."""
        self._store.retain(self.manifest.version)

    def publish(self) -> int:
        """See `Way`."""
        self._publish(base=self._publisher.version)
        return self.manifest.payload_bytes

    def fetch(self) -> None:
        """See `Way`."""
        self.receiver.fetch(self.manifest)

    def apply(self) -> None:
        """See `Way`."""
        self.receiver.apply(self.manifest)

    def _publish(self, *, base: int | None) -> None:
        version = 0 if base is None else base + 1
        publication = self._publisher.publish(local_bits(self._trained, rank=0, dtype="bfloat16"), version=version, base=base)
        self.manifest = merge([publication], run_epoch=0, version=version, base=base)
        self._store.commit(self.manifest)
        self._publisher.committed(version)


class WholeFile:
    """The whole state as a safetensors file, which vLLM reads in the pause. With one rank there is nothing to gather."""

    def __init__(self, trained: nn.Module, *, file: Path, read: Callable[[Path], None]) -> None:
        self._trained, self._file, self._read = trained, file, read

    def prepare(self) -> None:
        """Nothing."""

    def publish(self) -> int:
        """See `Way`."""
        save_file({name: tensor.bfloat16().contiguous() for name, tensor in checkpoint_tensors(self._trained).items()}, self._file)
        return self._file.stat().st_size

    def fetch(self) -> None:
        """Nothing can be read before the pause: it would be the model a second time."""

    def apply(self) -> None:
        """See `Way`."""
        self._read(self._file)


class Gathered:
    """The whole state again, gathered from the ranks of an FSDP2 trainer, which hold it in shards; then as `WholeFile`.

    Args:
        ranks: that write `file`.
    """

    def __init__(self, ranks: Ranks, *, file: Path, read: Callable[[Path], None]) -> None:
        self._ranks, self._file, self._read = ranks, file, read

    def prepare(self) -> None:
        """The ranks' weights become those of the file that another way has just written."""
        self._ranks.turn()

    def publish(self) -> int:
        """See `Way`."""
        self._ranks.turn()
        return self._file.stat().st_size

    def fetch(self) -> None:
        """See `WholeFile.fetch`."""

    def apply(self) -> None:
        """See `Way`."""
        self._read(self._file)


class IndexedDelta:
    """int32 index and value of each change, found by NumPy, in a safetensors file; `write` puts what was read of it into the model."""

    def __init__(self, trained: nn.Module, *, file: Path, write: Callable[[Mapping[str, tuple[Tensor, Tensor]]], None]) -> None:
        self._trained, self._file, self._write = trained, file, write
        self._old = {name: bits_of(tensor.bfloat16()).copy() for name, tensor in checkpoint_tensors(trained).items()}
        self._read: dict[str, tuple[Tensor, Tensor]] = {}

    def prepare(self) -> None:
        """Nothing."""

    def publish(self) -> int:
        """See `Way`."""
        found: dict[str, Tensor] = {}
        for name, tensor in checkpoint_tensors(self._trained).items():
            new, old = bits_of(tensor.bfloat16()), self._old[name]
            indices = np.flatnonzero(new != old)
            values = new[indices]
            old[indices] = values
            found[name + INDICES] = torch.from_numpy(indices.astype(np.int32))
            found[name + VALUES] = torch.from_numpy(values).view(torch.bfloat16)
        save_file(found, self._file)
        return self._file.stat().st_size

    def fetch(self) -> None:
        """See `Way`."""
        found = load_file(self._file)
        names = [name.removesuffix(INDICES) for name in found if name.endswith(INDICES)]
        self._read = {name: (found[name + INDICES], found[name + VALUES]) for name in names}

    def apply(self) -> None:
        """See `Way`."""
        self._write(self._read)


def by_loading(model: nn.Module) -> Callable[[Path], None]:
    """The model's loader alone, in place: the least that reading a whole file can cost."""
    def read(file: Path) -> None:
        with torch.no_grad(), safe_open(file, "pt") as opened:
            model.load_weights((name, opened.get_tensor(name)) for name in opened.keys())  # noqa: SIM118 - it is no mapping

    return read


def by_reloading(worker: Any) -> Callable[[Path], None]:
    """vLLM's own `reload_weights`: layer by layer, with everything that follows the loading of a layer."""
    return lambda file: worker.reload_weights(weights_path=str(file.parent))


def through_vllm(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> Callable[[Mapping[str, tuple[Tensor, Tensor]]], None]:
    """vLLM's own loader of sparse patches, with the checks that are its default."""
    from vllm.model_executor.model_loader.checkpoint_weight_patch import CheckpointWeightPatch, load_checkpoint_weight_patches

    def write(changes: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        load_checkpoint_weight_patches(model, [CheckpointWeightPatch(name, shapes[name], torch.bfloat16, values, indices)
                                               for name, (indices, values) in changes.items()])

    return write


def routed(model: nn.Module, *, folder: Path) -> Mapping[str, RoutedTarget]:
    """Where the tensors of the model's folder lie in the model, proved."""
    targets = record_routes(model, load=model.load_weights, tensors=saved_tensors(folder)).routed
    prove_base(targets, folder=folder)
    return targets


def through_routes(targets: Mapping[str, RoutedTarget]) -> Callable[[Mapping[str, tuple[Tensor, Tensor]]], None]:
    """Our routes, without a proof of anything."""

    def write(changes: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        for name, (indices, values) in changes.items():
            shape = targets[name].shape
            length = int(np.prod(shape))
            entry = TensorEntry(name=name, dtype="BF16", shape=shape, mode="blk16", part=0, offset=0, bytes=0, start=0, length=length,
                                count=len(indices))
            targets[name].write(entry, Changes(indices.numpy().astype(np.int64), bits_of(values)))

    return write


def timed(work: Callable[[], Any]) -> float:
    """Seconds."""
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s
