"""Either end of weight sync as a process, to be killed: `publish ROOT EPOCH` writes one version after another, `receive ROOT` follows.

What a version holds follows from its epoch and number alone, so whoever reads it knows what is right.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np

from asyncrl.errors import WeightSyncError
from asyncrl.process import die_with_parent
from asyncrl.weights.manifest import Manifest, Piece, merge
from asyncrl.weights.piece_bits import ArrayBits
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.receiver import Receiver, joined
from asyncrl.weights.store import StoreTransport
from asyncrl.weights.targets import MemoryTarget

SHAPES = {"embed.weight": (300, 70), "norm.weight": (1,), "up.weight": (64, 65)}
PIECES = [Piece(name=name, dtype="BF16", shape=shape, start=0, length=int(np.prod(shape))) for name, shape in SHAPES.items()]
PART_BYTES = 4096


def state_of(epoch: int, version: int) -> dict[str, np.ndarray]:
    """What a version holds: the one of number 0, and over it a few changes of each number up to this one."""
    rng = np.random.default_rng(epoch)
    state = {piece.name: rng.integers(0, 1 << 16, piece.length, dtype=np.uint16) for piece in PIECES}
    for number in range(1, version + 1):
        rng = np.random.default_rng([epoch, number])
        for piece in PIECES:
            places = rng.random(piece.length) < rng.choice([0.001, 0.05, 0.8])
            state[piece.name][places] ^= np.uint16(1)
    return state


def publish(root: Path, epoch: int) -> None:
    """Versions 0, 1, 2 … of a run epoch, for ever."""
    store = StoreTransport(root)
    publisher = Publisher(PIECES, rank=0, sink=store, part_bytes=PART_BYTES)
    for version in itertools.count():
        state, base = state_of(epoch, version), version - 1 if version else None
        publication = publisher.publish(ArrayBits([(piece, state[piece.name]) for piece in PIECES]), version=version, base=base)
        manifest = merge([publication], run_epoch=epoch, version=version, base=base)
        store.commit(manifest)
        print(manifest.to_json(), flush=True)  # whoever reads it may kill this process from here on
        publisher.committed(version)


def receive(root: Path) -> None:
    """For each manifest on the input, one a line: bring memory there, and say whether every bit of it is right, or `refused`."""
    memory = {piece.name: np.full(piece.length, 1, np.uint16) for piece in PIECES}
    targets = {piece.name: MemoryTarget(name=piece.name, shape=piece.shape, dtype="BF16", memory=memory[piece.name]) for piece in PIECES}
    receiver = Receiver(targets, source=StoreTransport(root))
    print("up", flush=True)
    for line in sys.stdin:
        manifest = Manifest.from_json(line)
        try:
            receiver.apply(manifest)
        except WeightSyncError as error:
            print("refused", error, flush=True)
            continue
        right = all(np.array_equal(memory[name], bits) for name, bits in state_of(manifest.run_epoch, manifest.version).items())
        print("right" if right and joined([receiver.audit()]) == manifest.state_hash else "WRONG", flush=True)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    if sys.argv[2] == "publish":
        publish(Path(sys.argv[3]), int(sys.argv[4]))
    else:
        receive(Path(sys.argv[3]))
