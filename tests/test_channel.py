from __future__ import annotations

import os
import pickle
import socket
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.channel import (
    MAX_ARRAY_BYTES,
    MAX_HEADER_BYTES,
    Channel,
    Decoder,
    Message,
    ParentGone,
    Reply,
    encode,
    pack,
    serve_calls,
)
from asyncrl.errors import ProtocolError

ARRAYS = {
    "matrix": np.arange(6, dtype=np.int32).reshape(2, 3),
    "strided": np.arange(10, dtype=np.float32)[::2],
    "swapped": np.arange(3, dtype=">i8"),
    "mask": np.array([True, False]),
    "scalar": np.array(7, dtype=np.int16),
    "empty": np.zeros((0, 4), dtype=np.float64),
}


def to_bytes(message: Message) -> bytes:
    return b"".join(bytes(buffer) for buffer in encode(message))


def framed(header: bytes) -> bytes:
    return len(header).to_bytes(4, "little") + header


def header(**changes: object) -> bytes:
    return framed(pack({"op": "x", "id": 1, "deadline_s": None, "body": {}, "arrays": [], **changes}))


def array_header(**changes: object) -> bytes:
    return header(arrays=[{"name": "a", "dtype": "int8", "shape": [1], **changes}])


class Touch:
    """Unpickling it would create a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self.path,)


def test_a_message_comes_back_as_it_was_sent() -> None:
    [message] = Decoder().feed(to_bytes(Message("op", 5, {"a": (1, 2), 3: np.float32(0.5), "text": "\ud800"}, ARRAYS, 1.5)))
    assert (message.op, message.id, message.deadline_s) == ("op", 5, 1.5)
    assert message.body == {"a": [1, 2], 3: 0.5, "text": "\ud800"}
    assert list(message.arrays) == list(ARRAYS)
    for name, array in message.arrays.items():
        np.testing.assert_array_equal(array, ARRAYS[name], strict=name != "swapped")
        assert array.flags.writeable
    assert message.arrays["swapped"].dtype == np.int64


def test_arrays_too_large_to_be_joined_come_back() -> None:
    big = np.arange(100_000, dtype=np.int64)
    buffers = encode(Message("op", arrays={"big": big, "small": np.ones(2)}))
    assert len(buffers) == 3
    [message] = Decoder().feed(b"".join(buffers))
    np.testing.assert_array_equal(message.arrays["big"], big)
    np.testing.assert_array_equal(message.arrays["small"], np.ones(2))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60))
def test_messages_do_not_depend_on_how_their_bytes_are_cut(cuts: list[int]) -> None:
    data = b"".join(to_bytes(Message("op", i, {"i": i}, {"a": np.full(i, i, np.int16)})) for i in range(4))
    decoder, messages = Decoder(), []
    for cut in [*cuts, len(data)]:
        messages += decoder.feed(data[:cut])
        data = data[cut:]
    assert [(m.id, m.body["i"], m.arrays["a"].tolist()) for m in messages] == [(i, i, [i] * i) for i in range(4)]


@pytest.mark.parametrize("frame", [lambda data: data, framed])
def test_a_pickle_is_refused_and_creates_nothing(tmp_path, frame) -> None:
    target = tmp_path / "created"
    payload = frame(pickle.dumps(Touch(str(target)), protocol=4))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(payload + b"\0" * 64)
        with pytest.raises(ProtocolError):
            Channel(theirs).recv()
    assert not target.exists()


@pytest.mark.parametrize(("data", "text"), [
    ((MAX_HEADER_BYTES + 1).to_bytes(4, "little"), "a header of 67108865 bytes"),
    (array_header(dtype="uint8", shape=[MAX_ARRAY_BYTES + 1]), "4294967297 bytes of arrays"),
    (array_header(shape=[2**62, 2**62]), "bytes of arrays; at most"),
    (array_header(dtype="object"), "dtype 'object'"),
    (array_header(dtype=["float32"]), "dtype \\['float32'\\]"),
    (array_header(shape=[-1]), "shape"),
    (array_header(shape=[True]), "shape"),
    (array_header(shape=[1] * 33), "shape"),
    (array_header(shape=[0] + [2**40] * 3), "shape"),
    (array_header(name=3), "name"),
    (header(arrays=[3]), "name"),
    (header(body=[]), "'body' holds a list"),
    (header(id="1"), "'id' holds a str"),
    (header(more=1), "a map of"),
    (framed(pack([1])), "a map of"),
    (framed(b"\xc1"), "not msgpack"),
    (framed(pack({}) + b"x"), "not msgpack"),
])
def test_a_malformed_message_is_refused_with_its_fault(data: bytes, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        Decoder().feed(data)


def test_what_cannot_travel_is_refused_by_the_sender() -> None:
    with pytest.raises(ProtocolError, match="dtype object"):
        encode(Message("op", arrays={"a": np.array([None])}))
    with pytest.raises(TypeError, match="a set cannot travel"):
        encode(Message("op", body={"a": {1}}))
    huge = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (MAX_ARRAY_BYTES + 1,), (0,))
    with pytest.raises(ProtocolError, match="4294967297 bytes of arrays"):
        encode(Message("op", arrays={"a": huge}))


def test_serve_calls_answers_each_request_and_survives_a_failing_notice() -> None:
    ours, theirs = socket.socketpair()

    def echo(request: Message) -> Reply:
        return Reply({"n": request.body["n"]}, request.arrays)

    with ours, theirs:
        server = threading.Thread(target=serve_calls, args=(Channel(theirs), {"echo": echo, "nothing": lambda request: None}))
        server.start()
        sent = [Message("echo", 0, {}), Message("cancel", 9), Message("echo", 1, {"n": 1}, {"a": np.ones(1)}), Message("lost", 2),
                Message("nothing", 3), Message("close")]
        ours.sendall(b"".join(to_bytes(message) for message in sent))
        server.join(timeout=10)
        assert not server.is_alive()
        ready, answer, unknown, nothing = Decoder().feed(ours.recv(2**16))
    assert (ready.id, ready.op) == (0, "reply")
    assert (answer.id, answer.body, answer.arrays["a"].tolist()) == (1, {"n": 1}, [1.0])
    assert (unknown.id, unknown.op) == (2, "error")
    assert "unknown operation 'lost'" in unknown.body["message"]
    assert (nothing.id, nothing.body) == (3, {})


def test_a_channel_says_that_its_controller_is_gone() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        channel = Channel(theirs)
        ours.close()
        with pytest.raises(ParentGone):
            channel.recv()
        with pytest.raises(ParentGone):
            channel.reply(1, {})
