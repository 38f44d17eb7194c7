"""What a publication costs does not grow with the number of tensors or the size of the largest: calls, launches, memory."""

import functools
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrl.weights import numpy_kernels
from asyncrl.weights.manifest import Part, Piece
from asyncrl.weights.piece_bits import ArrayBits
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.snapshot import HostSnapshot
from asyncrl.weights.torch_pieces import local_bits, local_pieces
from asyncrl.weights.torch_snapshot import DeviceSnapshot


class Nowhere:
    def put_part(self, version, *, rank, bucket, chunks):
        return Part(path=f"{version}-{rank}-{bucket}", bytes=sum(len(chunk) for chunk in chunks), xxh3="")


class Launches(TorchDispatchMode):
    """Counts operations that compute or copy; a view is none."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not (func.is_view or func in (torch.ops.aten.detach.default, torch.ops.aten._unsafe_view.default)):
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class Many(nn.Module):
    def __init__(self, count, elements=50):
        super().__init__()
        self.all = nn.ParameterList(nn.Parameter(torch.ones(elements)) for _ in range(count))


def delta(model, **arguments):
    """Publishes an anchor, changes the model and gives what a delta of it needs."""
    made = Publisher(local_pieces(model, rank=0, dtype="bfloat16"), rank=0, sink=Nowhere(), **arguments)
    made.publish(local_bits(model, rank=0, dtype="bfloat16"), version=0, base=None)
    made.committed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter[::100] += 1

    def publish():
        made.abandon()
        return made.publish(local_bits(model, rank=0, dtype="bfloat16"), version=1, base=0)

    return publish


def test_many_small_tensors_are_scanned_in_a_few_calls():
    calls = []

    def counting(name):
        return lambda *arguments: calls.append(name) or getattr(numpy_kernels, name)(*arguments)

    kernels = SimpleNamespace(**{name: counting(name) for name in ("scan", "pack", "hash_blocks", "hash_runs", "first_not_finite")})
    pieces = [Piece(name=f"{number}", dtype="BF16", shape=(40,), start=0, length=40) for number in range(12_000)]
    made = Publisher(pieces, rank=0, sink=Nowhere(), snapshot=functools.partial(HostSnapshot, kernels=kernels))
    state = np.zeros((12_000, 40), np.uint16)
    made.publish(ArrayBits(list(zip(pieces, state, strict=True))), version=0, base=None)
    made.committed(0)
    state[:, 7] = 1
    calls.clear()
    publication = made.publish(ArrayBits(list(zip(pieces, state, strict=True))), version=1, base=0)
    assert calls == ["scan", "pack", "hash_blocks"]
    assert {(entry.count, entry.mode, entry.bytes) for entry in publication.entries} == {(1, "bitmap", 7)}


def test_launches_do_not_grow_with_the_number_of_tensors():
    counted = []
    for count in (10, 1000):
        publish = delta(Many(count), snapshot=functools.partial(DeviceSnapshot, device=torch.device("cpu")))
        with Launches() as launches:
            publication = publish()
        assert sum(entry.count for entry in publication.entries) == count
        counted.append(launches.names)
    assert counted[0] == counted[1]
    assert len(counted[0]) <= 10, counted[0]


@pytest.mark.slow
def test_a_large_tensor_is_never_copied_whole():
    # 48M elements: 192 MB as trained, 96 MB as published, of which 1% change
    publish = delta(Many(1, 48 << 20))
    publish()  # code is compiled, which takes memory of its own
    tracemalloc.start()
    try:
        with Launches() as launches:
            publish()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 72 << 20, "scratch of a stretch of 8M elements, four times 16 MB, and what changed"
    assert set(launches.names) <= {"_foreach_copy_"}, "nothing else may make a tensor"
