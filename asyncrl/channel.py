"""The wire between a controller and its children, and the child's end of it.

A message is a 4-byte little-endian length, a msgpack header {op, id, deadline_s, body, arrays} and the raw bytes of the
arrays. Nothing on the wire can name code: no pickle, dtypes from a list, sizes checked before anything is allocated.
"""

from __future__ import annotations

import math
import socket
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ProtocolError, describe_error

MAX_HEADER_BYTES = 64 * 2**20
MAX_ARRAY_BYTES = 4 * 2**30
RECEIVE_BYTES = 2**18
DTYPES = frozenset({"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"})

REPLY, PART, ERROR = "reply", "part", "error"
"""Operations of a child: the last answer to a request, one of several, and the failure that ends it."""
CLOSE, CANCEL = "close", "cancel"
"""Notices of a controller: end now; the caller of request `id` no longer waits."""
START_ID = NOTICE_ID = 0
"""The first message is answered by `ready`; later messages with this id are notices and get no answer."""

_LENGTH_BYTES = 4
_JOIN_BYTES = 2**16
_MAX_DIMENSIONS = 32
_HEADER_KEYS = {"op", "id", "deadline_s", "body", "arrays"}


class ParentGone(EOFError):
    """The controller closed the socket or died."""


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """What travels, in either direction."""

    op: str
    id: int = NOTICE_ID
    body: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    deadline_s: float | None = None
    """How long the caller waits, counted from sending; None without limit."""


Request = Message
"""A message from the controller, as `Channel.recv` gives it."""


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """An answer, or one part of a streamed answer."""

    body: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)


def pack(value: object) -> bytes:
    """msgpack bytes; NumPy scalars become numbers, tuples lists. Raises TypeError or OverflowError on what cannot travel."""
    return msgpack.packb(value, default=_plain, unicode_errors="surrogatepass")


def unpack(data: bytes | bytearray) -> Any:
    """The value `pack` wrote. Raises ProtocolError on anything else."""
    try:
        return msgpack.unpackb(data, strict_map_key=False, unicode_errors="surrogatepass")
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise ProtocolError(f"not msgpack: {type(error).__name__}: {error}") from error


def encode(message: Message) -> list[bytes | memoryview]:
    """Buffers to send in order. Raises ProtocolError over the size limits, TypeError on what cannot travel."""
    described, payload = [], []
    array_bytes = sum(np.asarray(given).nbytes for given in message.arrays.values())
    _check_sizes(0, array_bytes)
    for name, given in message.arrays.items():
        array = np.asarray(given, order="C")
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
        if array.dtype.name not in DTYPES:
            raise ProtocolError(f"array {name!r} has dtype {array.dtype}; allowed: {sorted(DTYPES)}")
        described.append({"name": name, "dtype": array.dtype.name, "shape": array.shape})
        payload.append(array.reshape(-1).view(np.uint8).data)
    header = pack({"op": message.op, "id": message.id, "deadline_s": message.deadline_s, "body": message.body, "arrays": described})
    _check_sizes(len(header), 0)
    head = len(header).to_bytes(_LENGTH_BYTES, "little") + header
    return [b"".join([head, *payload])] if array_bytes <= _JOIN_BYTES else [head, *payload]


class Decoder:
    """Turns bytes, in whatever pieces they arrive, into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._header: dict[str, Any] | None = None
        self._array_bytes = 0

    def feed(self, data: bytes) -> list[Message]:
        """Messages completed by `data`. Raises ProtocolError as soon as the bytes cannot become one."""
        buffer = self._buffer
        buffer += data
        messages = []
        while True:
            if self._header is None:
                if len(buffer) < _LENGTH_BYTES:
                    return messages
                end = _LENGTH_BYTES + int.from_bytes(buffer[:_LENGTH_BYTES], "little")
                _check_sizes(end - _LENGTH_BYTES, 0)
                if len(buffer) < end:
                    return messages
                self._header, self._array_bytes = _parse_header(buffer[_LENGTH_BYTES:end])
                del buffer[:end]
            if len(buffer) < self._array_bytes:
                return messages
            messages.append(self._take(self._header))
            self._header = None

    def _take(self, header: dict[str, Any]) -> Message:
        arrays = {}
        for entry in header["arrays"]:
            dtype = np.dtype(entry["dtype"])
            size = dtype.itemsize * math.prod(entry["shape"])
            try:
                arrays[entry["name"]] = np.frombuffer(self._buffer[:size], dtype=dtype).reshape(entry["shape"])
            except ValueError as error:
                raise ProtocolError(f"array {entry['name']!r} cannot have shape {entry['shape']}: {error}") from error
            del self._buffer[:size]
        return Message(header["op"], header["id"], header["body"], arrays, header["deadline_s"])


class Channel:
    """The child's end. One thread receives; any thread may reply."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._socket = sock
        self._decoder = Decoder()
        self._inbox: deque[Message] = deque()
        self._lock = threading.Lock()
        self.is_ready = False
        """Whether `ready` has been called."""

    def recv(self) -> Request:
        """The next request; blocks. Raises ParentGone (an EOFError), or ProtocolError on a malformed message."""
        while not self._inbox:
            try:
                data = self._socket.recv(RECEIVE_BYTES)
            except ConnectionError as error:
                raise ParentGone("the controller is gone") from error
            if not data:
                raise ParentGone("the controller is gone")
            self._inbox.extend(self._decoder.feed(data))
        return self._inbox.popleft()

    def ready(self, body: Mapping[str, Any] | None = None) -> None:
        """Say, once, that set-up is done; `body` becomes `Child.ready`."""
        self.is_ready = True
        self.reply(START_ID, body)

    def reply(self, request_id: int, body: Mapping[str, Any] | None = None, *,
              arrays: Mapping[str, NDArray[Any]] | None = None, last: bool = True) -> None:
        """Answer a request; `last=False` for all but the end of a stream. Raises ParentGone, ProtocolError, TypeError."""
        self._send(Message(REPLY if last else PART, request_id, body or {}, arrays or {}))

    def fail(self, request_id: int, error: BaseException) -> None:
        """End a request with an error: its class name, text and traceback travel. Raises ParentGone."""
        self._send(Message(ERROR, request_id, describe_error(error)))

    def _send(self, message: Message) -> None:
        buffers = encode(message)
        try:
            with self._lock:
                for buffer in buffers:
                    self._socket.sendall(buffer)
        except ConnectionError as error:
            raise ParentGone("the controller is gone") from error


def serve_calls(channel: Channel, handlers: Mapping[str, Callable[[Request], Reply | Mapping[str, Any] | None]]) -> None:
    """Answer requests one after another until `close` or the end of the controller. Says ready first, unless that was said.

    A handler that raises fails its request and the loop goes on; for a notice the traceback goes to the log.
    """
    if not channel.is_ready:
        channel.ready()
    while True:
        try:
            request = channel.recv()
            if request.op == CLOSE:
                return
            if request.op != CANCEL:
                _answer(channel, request, handlers)
        except ParentGone:
            return


def _answer(channel: Channel, request: Request, handlers: Mapping[str, Callable[[Request], Reply | Mapping[str, Any] | None]]) -> None:
    try:
        handler = handlers.get(request.op)
        if handler is None:
            raise ProtocolError(f"unknown operation {request.op!r}; known: {sorted(handlers)}")
        result = handler(request)
        reply = result if isinstance(result, Reply) else Reply(result or {})
        if request.id != NOTICE_ID:
            channel.reply(request.id, reply.body, arrays=reply.arrays)
    except ParentGone:
        raise
    except Exception as error:
        if request.id == NOTICE_ID:
            traceback.print_exception(error)
        else:
            channel.fail(request.id, error)


def _parse_header(data: bytearray) -> tuple[dict[str, Any], int]:
    """A checked header and the number of array bytes that follow it."""
    header = unpack(data)
    if not isinstance(header, dict) or set(header) != _HEADER_KEYS:
        raise ProtocolError(f"a header must be a map of {sorted(_HEADER_KEYS)}")
    kinds = {"op": str, "id": int, "deadline_s": (int, float, type(None)), "body": dict, "arrays": list}
    for key, kind in kinds.items():
        if not isinstance(header[key], kind):
            raise ProtocolError(f"header field {key!r} holds a {type(header[key]).__name__}")
    size = 0
    for entry in header["arrays"]:
        if not isinstance(entry, dict) or set(entry) != {"name", "dtype", "shape"} or not isinstance(entry["name"], str):
            raise ProtocolError("an array must be described by name, dtype and shape")
        if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
            raise ProtocolError(f"array {entry['name']!r} has dtype {entry['dtype']!r}; allowed: {sorted(DTYPES)}")
        shape = entry["shape"]
        if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS or not all(type(n) is int and n >= 0 for n in shape):
            raise ProtocolError(f"array {entry['name']!r} has shape {shape!r}")
        size += np.dtype(entry["dtype"]).itemsize * math.prod(shape)
    _check_sizes(0, size)
    return header, size


def _check_sizes(header_bytes: int, array_bytes: int) -> None:
    if header_bytes > MAX_HEADER_BYTES:
        raise ProtocolError(f"a header of {header_bytes} bytes; at most {MAX_HEADER_BYTES}")
    if array_bytes > MAX_ARRAY_BYTES:
        raise ProtocolError(f"{array_bytes} bytes of arrays; at most {MAX_ARRAY_BYTES}")


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot travel between processes: {value!r:.100}")
