"""The bits published last, on the trainer's own device, and their scan by a few launches a stretch, however many tensors lie in it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from asyncrl.weights import numpy_kernels
from asyncrl.weights.codec import Bits
from asyncrl.weights.encoder import Found, Undo, encoded
from asyncrl.weights.kernels import kernels_for
from asyncrl.weights.piece_bits import PieceBits, Stretch
from asyncrl.weights.publisher import MakeSnapshot
from asyncrl.weights.torch_pieces import TensorBits

_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers as wide as an element; torch compares and indexes signed ones on every device."""


def snapshot_on(device: torch.device) -> MakeSnapshot | None:
    """What `Publisher` is to keep its snapshot in for weights on `device`; None: what it does by itself, the memory of the host."""
    return None if device.type == "cpu" else functools.partial(DeviceSnapshot, device=device)


class DeviceSnapshot:
    """A `Snapshot` in the memory of a device, for `TensorBits` that lie on it; what changed crosses to the host, and no more."""

    most_elements = 1 << 25
    """Under 512 MB of temporaries, if everything changed; a bucket of bfloat16 is eight such stretches."""
    at_once = 1

    def __init__(self, nbytes: int, *, device: torch.device, threads: int = 1) -> None:
        self._memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._room = torch.empty(0, dtype=torch.uint8, device=device)
        self._kernels = kernels_for(nbytes // 2)

    @property
    def nbytes(self) -> int:
        """See `Snapshot.nbytes`."""
        return self._memory.nbytes

    def move(self, bits: PieceBits, stretches: Sequence[Stretch]) -> list[Found]:
        """See `Snapshot.move`."""
        stretch, = stretches
        if self._room.nbytes < (needed := stretch.elements * stretch.word.itemsize):
            self._room = self._room.new_empty(0)
            self._room = self._room.new_empty(needed)
        new, old = _words(self._room, 0, stretch), self._held(stretch)
        _tensors(bits).stage_tensor(stretch.spans, new)
        places = (new != old).nonzero().view(-1)
        values, olds = _on_host(new[places], stretch), _on_host(old[places], stretch)
        old.copy_(new)
        offsets, blocks, counts = numpy_kernels.located(places.cpu().numpy(), stretch.lengths)
        return [encoded(stretch, new=lambda: _on_host(new, stretch), counts=counts, values=values, undo=Undo(blocks, offsets, olds),
                        finite=bits.finite, kernels=self._kernels)]

    def undo(self, stretch: Stretch, undo: Undo) -> None:
        """See `Snapshot.undo`."""
        places = torch.from_numpy(numpy_kernels.places(stretch.lengths, undo.blocks, undo.offsets)).to(self._memory.device)
        olds = torch.from_numpy(undo.olds).view(_SIGNED[stretch.word.itemsize]).to(self._memory.device)
        self._held(stretch)[places] = olds

    def fill(self, bits: PieceBits, stretch: Stretch) -> Bits:
        """See `Snapshot.fill`."""
        _tensors(bits).stage_tensor(stretch.spans, self._held(stretch))
        return self.read(stretch)

    def read(self, stretch: Stretch) -> Bits:
        """See `Snapshot.read`."""
        return _on_host(self._held(stretch), stretch)

    def _held(self, stretch: Stretch) -> Tensor:
        assert stretch.place is not None
        return _words(self._memory, stretch.place, stretch)


def _tensors(bits: PieceBits) -> TensorBits:
    assert isinstance(bits, TensorBits), "a snapshot on a device is moved on by tensors"
    return bits


def _words(memory: Tensor, place: int, stretch: Stretch) -> Tensor:
    width = stretch.word.itemsize
    return memory[place:place + stretch.elements * width].view(_SIGNED[width])


def _on_host(words: Tensor, stretch: Stretch) -> Bits:
    """A copy, also where the device is the host."""
    return np.array(words.cpu().numpy().view(stretch.word), copy=True)
