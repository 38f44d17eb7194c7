"""A small model of plain tensors and the two ends of its weight sync."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.weights.manifest import Manifest, Piece, merge
from asyncrl.weights.piece_bits import ArrayBits
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.receiver import Receiver
from asyncrl.weights.store import StoreTransport
from asyncrl.weights.torch_pieces import memory_targets

SHAPES = {"embed.weight": (40, 7), "norm.weight": (1,), "up.weight": (3, 5)}


class Rig:
    """A publisher of one rank, its store, and state that changes at random."""

    def __init__(self, root: Path, *, seed: int = 0, part_bytes: int = 1 << 20, store: StoreTransport | None = None) -> None:
        self.rng = np.random.default_rng(seed)
        self.pieces = [Piece(name=name, dtype="BF16", shape=shape, start=0, length=int(np.prod(shape))) for name, shape in SHAPES.items()]
        self.state = {piece.name: self.rng.integers(0, 65535, piece.length, dtype=np.uint16) for piece in self.pieces}
        self.root, self.store = root, store or StoreTransport(root)
        self.publisher = Publisher(self.pieces, rank=0, sink=self.store, part_bytes=part_bytes)

    def bits(self) -> ArrayBits:
        return ArrayBits([(piece, self.state[piece.name]) for piece in self.pieces])

    def change(self, density: float = 0.1) -> None:
        self.state = {name: np.where(self.rng.random(len(bits)) < density, bits ^ np.uint16(1), bits) for name, bits in self.state.items()}

    def publish(self, version: int, *, base: int | None, run_epoch: int = 0) -> Manifest:
        publication = self.publisher.publish(self.bits(), version=version, base=base)
        manifest = merge([publication], run_epoch=run_epoch, version=version, base=base)
        self.store.commit(manifest)
        self.publisher.committed(version)
        return manifest

    def anchor(self, *, run_epoch: int = 0) -> Manifest:
        """The committed version once more, whole."""
        manifest = merge([self.publisher.anchor()], run_epoch=run_epoch, version=self.publisher.version, base=None)
        self.store.commit(manifest)
        return manifest

    def targets(self, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
        return {name: torch.full(shape, 0.5, dtype=dtype) for name, shape in SHAPES.items()}

    def holds(self, targets: dict[str, torch.Tensor]) -> bool:
        """Whether the targets are the current state, bit for bit; a runtime float32 has it in its upper half."""
        return all(raw(targets[name]) == runtime_bytes(bits, targets[name].dtype) for name, bits in self.state.items())


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()


def runtime_bytes(bits: np.ndarray, dtype: torch.dtype) -> bytes:
    return bits.tobytes() if dtype == torch.bfloat16 else (bits.astype(np.uint32) << np.uint32(16)).tobytes()


@pytest.fixture(scope="session")
def make_rig(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Rig]:
    return lambda **arguments: Rig(tmp_path_factory.mktemp("weights"), **arguments)


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig()


@pytest.fixture
def synced(rig: Rig) -> tuple[Rig, dict[str, torch.Tensor], Receiver]:
    """A receiver that holds the anchor, version 0."""
    targets = rig.targets()
    receiver = Receiver(memory_targets(targets), source=rig.store)
    receiver.apply(rig.publish(0, base=None))
    return rig, targets, receiver
