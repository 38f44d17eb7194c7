"""The snapshot moves during a publication and goes back, bit for bit, when that comes to nothing; or it is lost, and says so."""

import threading

import numpy as np
import pytest
import torch
from torch import nn

from asyncrl.errors import NonFiniteError, WeightSyncError, WrongBase
from asyncrl.weights import piece_bits, publisher, snapshot
from asyncrl.weights.manifest import Part, Piece
from asyncrl.weights.piece_bits import ArrayBits
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.torch_pieces import local_bits, local_pieces
from asyncrl.weights.torch_snapshot import DeviceSnapshot


class Sink:
    """What a rank has of a transport that engines cannot be read back from."""

    def __init__(self):
        self.parts = []

    def put_part(self, version, *, rank, bucket, chunks):
        self.parts.append(b"".join(bytes(chunk) for chunk in chunks))
        return Part(path=f"{version}-{rank}-{bucket}", bytes=len(self.parts[-1]), xxh3="")

    def deliver(self, manifest):
        raise AssertionError


class FullSink(Sink):
    """Takes so many parts."""

    def __init__(self, room):
        super().__init__()
        self.room = room

    def put_part(self, version, **arguments):
        if len(self.parts) == self.room:
            raise WeightSyncError("No space left on device")
        return super().put_part(version, **arguments)


class Mixed(nn.Module):
    """Several stretches: of bfloat16, of float32, of integers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(30, 20) for _ in range(6))
        self.register_buffer("scale", torch.randn(7))
        self.register_buffer("steps", torch.tensor([3]))
        self.last = nn.Linear(30, 40, bias=False)

    @torch.no_grad()
    def change(self, density=0.2):
        for parameter in self.parameters():
            parameter.copy_(torch.where(torch.rand_like(parameter) < density, parameter * 1.1 + 0.01, parameter))
        self.scale += 1
        self.steps += 1


def on_the_host(nbytes, *, threads):
    return snapshot.HostSnapshot(nbytes, threads=threads)


def on_a_device(nbytes, *, threads):
    return DeviceSnapshot(nbytes, device=torch.device("cpu"), threads=threads)


@pytest.fixture(autouse=True)
def short_stretches(monkeypatch):
    for kind in (snapshot.HostSnapshot, DeviceSnapshot):
        monkeypatch.setattr(kind, "most_elements", 1500)


@pytest.fixture(params=[on_the_host, on_a_device])
def kept(request):
    return request.param


def publisher_of(model, sink, kept, **arguments):
    return Publisher(local_pieces(model, rank=0, dtype="bfloat16"), rank=0, sink=sink, snapshot=kept, **arguments)


def publish(made, model, version, base):
    return made.publish(local_bits(model, rank=0, dtype="bfloat16"), version=version, base=base)


def held(made):
    memory = made._snapshot._memory
    return bytes(memory if isinstance(memory, np.ndarray) else memory.numpy())


@pytest.mark.parametrize("threads", [1, 3])
def test_what_is_abandoned_is_put_back_and_published_with_the_next(kept, threads):
    model, sink = Mixed(), Sink()
    made = publisher_of(model, sink, kept, threads=threads)
    publish(made, model, 0, None)
    made.committed(0)
    before = held(made)
    model.change()
    first = publish(made, model, 1, 0)
    assert held(made) != before
    made.abandon()
    assert (held(made), made.version) == (before, 0)
    assert publish(made, model, 1, 0) == first  # the same bytes again, too
    assert sink.parts[-1] == sink.parts[-2]
    made.committed(1)
    after = held(made)
    made.abandon()  # nothing is pending
    assert (held(made), made.version) == (after, 1)


@pytest.mark.parametrize("room", [0, 1, 2])
def test_a_sink_that_is_full_half_way_leaves_the_snapshot_as_it_was(kept, room, monkeypatch):
    monkeypatch.setattr(publisher, "LOG_FRACTION", 100)  # parts this small leave no room for a log
    model = Mixed()
    sink = FullSink(room=1000)
    made = publisher_of(model, sink, kept, part_bytes=1500)
    publish(made, model, 0, None)
    made.committed(0)
    before = held(made)
    model.change(0.5)
    sink.room = len(sink.parts) + room
    with pytest.raises(WeightSyncError, match="No space"):
        publish(made, model, 1, 0)
    assert (held(made), made.version) == (before, 0)


def test_a_value_that_is_not_finite_half_way_leaves_the_snapshot_as_it_was(kept):
    model = Mixed()
    made = publisher_of(model, Sink(), kept)
    publish(made, model, 0, None)
    made.committed(0)
    before = held(made)
    model.change()
    with torch.no_grad():
        model.layers[3].weight[2, 5] = torch.inf
    with pytest.raises(NonFiniteError, match=r"layers\.3\.weight holds a value that is not finite as BF16"):
        publish(made, model, 1, 0)
    assert (held(made), made.version) == (before, 0)


def test_beyond_what_the_log_may_hold_the_snapshot_is_lost_and_an_anchor_must_follow(kept, monkeypatch):
    monkeypatch.setattr(publisher, "LOG_FRACTION", 0.001)
    model = Mixed()
    made = publisher_of(model, Sink(), kept, part_bytes=1 << 20)
    publish(made, model, 0, None)
    made.committed(0)
    model.change(0.001)
    publish(made, model, 1, 0)
    made.abandon()
    assert made.version == 0  # little had changed
    model.change()
    publish(made, model, 1, 0)
    made.abandon()
    assert made.version is None
    with pytest.raises(WrongBase, match="snapshot holds None"):
        publish(made, model, 2, 0)
    with pytest.raises(WeightSyncError, match="no committed version"):
        made.anchor()
    publish(made, model, 2, None)
    made.committed(2)
    assert made.version == 2


def test_an_anchor_keeps_no_log(kept):
    model = Mixed()
    made = publisher_of(model, Sink(), kept)
    publish(made, model, 0, None)
    made.committed(0)
    publish(made, model, 1, None)
    with pytest.raises(WeightSyncError, match="version 1 is pending"):
        made.anchor()
    made.abandon()
    assert made.version is None


def test_the_next_bucket_is_scanned_while_one_is_written_and_never_two_are(monkeypatch):
    monkeypatch.setattr(piece_bits, "ENTRY_ELEMENTS", 500)
    going_on = threading.Event()
    alive = []

    class Slow(Sink):
        def put_part(self, version, *, rank, bucket, chunks):
            alive.append(bucket)
            if version and bucket == 0:
                assert going_on.wait(60), "nothing was scanned beside the writing"
            alive.remove(bucket)
            assert not alive
            return super().put_part(version, rank=rank, bucket=bucket, chunks=chunks)

    class Watched(ArrayBits):
        def sources(self, spans):
            if spans[0].low >= 3000:
                going_on.set()
            return super().sources(spans)

    piece = Piece(name="a", dtype="BF16", shape=(20_000,), start=0, length=20_000)
    made = Publisher([piece], rank=0, sink=Slow(), part_bytes=5000, snapshot=on_the_host)
    made.publish(ArrayBits([(piece, np.zeros(20_000, np.uint16))]), version=0, base=None)
    made.committed(0)
    going_on.clear()
    publication = made.publish(Watched([(piece, np.ones(20_000, np.uint16))]), version=1, base=0)
    assert [part.bytes for part in publication.parts] == [5000] * 8
    assert [(entry.part, entry.offset) for entry in publication.entries] == [(n // 5, n % 5 * 1000) for n in range(40)]


def compiled(nbytes, *, threads):
    kernels = pytest.importorskip("asyncrl.weights.numba_kernels", reason="needs numba", exc_type=ImportError)
    return snapshot.HostSnapshot(nbytes, kernels=kernels, threads=threads)


@pytest.mark.parametrize("few_elements", [0, snapshot.FEW_ELEMENTS])
@pytest.mark.parametrize("other", [on_a_device, compiled])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_device_and_compiled_code_publish_the_bytes_numpy_does(dtype, other, few_elements, monkeypatch):
    monkeypatch.setattr(snapshot, "FEW_ELEMENTS", few_elements)  # 0: all weights are read, and rounded, where they lie
    model = Mixed()
    made, sinks = [], (Sink(), Sink())
    for sink, kept in zip(sinks, (on_the_host, other), strict=True):
        made.append(Publisher(local_pieces(model, rank=0, dtype=dtype), rank=0, sink=sink, snapshot=kept))
    for version, density in enumerate([1, 0.002, 0.05, 0.5, 1.0, 0]):
        if version:
            model.change(density)
        base = version - 1 if version else None
        both = [one.publish(local_bits(model, rank=0, dtype=dtype), version=version, base=base) for one in made]
        assert both[0] == both[1]
        for one in made:
            one.committed(version)
        assert held(made[0]) == held(made[1])
    assert sinks[0].parts == sinks[1].parts
    assert made[0].anchor() == made[1].anchor()


def test_when_one_thread_fails_no_other_still_moves_the_snapshot(monkeypatch):
    monkeypatch.setattr(snapshot.HostSnapshot, "most_elements", 100)
    model = Mixed()
    pieces = local_pieces(model, rank=0, dtype="float32")
    sender = Publisher(pieces, rank=0, sink=Sink(), threads=2)
    sender.publish(local_bits(model, rank=0, dtype="float32"), version=0, base=None)
    sender.committed(0)
    failed, rolled_back, early = threading.Event(), threading.Event(), []
    move, roll_back = snapshot.HostSnapshot._move, Publisher._roll_back

    def first_fails(held, bits, stretch):
        if stretch.place == 0:
            failed.set()
            raise MemoryError
        assert failed.wait(20)
        early.append(rolled_back.wait(0.1))
        return move(held, bits, stretch)

    monkeypatch.setattr(snapshot.HostSnapshot, "_move", first_fails)
    monkeypatch.setattr(Publisher, "_roll_back", lambda publisher: (rolled_back.set(), roll_back(publisher)))
    with pytest.raises(MemoryError):
        sender.publish(local_bits(model, rank=0, dtype="float32"), version=1, base=0)
    assert early
    assert not any(early)
    assert sender.version is None
