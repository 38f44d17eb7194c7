"""The controller's end of a socket to a child: messages out with back-pressure, messages in the moment they arrive."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable

from asyncrl.channel import RECEIVE_BYTES, Decoder, Message, encode
from asyncrl.errors import ProtocolError

_HIGH_WATER_BYTES = 2**20
"""`drain` waits while more than this is unsent."""


class Connection:
    """Belongs to the running loop. Messages are handed over inside the loop's I/O callback, before any expired timer runs:
    an answer that arrived while the controller was busy counts as in time.
    """

    def __init__(self, sock: socket.socket, *, on_message: Callable[[Message], None],
                 on_end: Callable[[ProtocolError | None], None]) -> None:
        """`on_end` is called once, when the peer is gone (None) or has sent a message that is malformed, or that `on_message` refuses
        with ProtocolError; not after `close`."""
        sock.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._socket = sock
        self._decoder = Decoder()
        self._on_message, self._on_end = on_message, on_end
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._drained = asyncio.Event()
        self._drained.set()
        self._finishing = False
        self.closed = False
        self._loop.add_reader(sock, self._readable)

    def send(self, message: Message) -> None:
        """Queue a message; after the end it goes nowhere. Raises ProtocolError or TypeError when it cannot travel."""
        buffers = encode(message)
        if self.closed or self._finishing:
            return
        waiting = bool(self._unsent)
        for buffer in buffers:
            self._unsent.append(memoryview(buffer))
            self._unsent_bytes += len(buffer)
        if not waiting:
            self._flush()

    async def drain(self) -> None:
        """Waits while more than 1 MiB is unsent; woken by the socket, or by its end."""
        await self._drained.wait()

    def finish(self) -> None:
        """Send what is queued, then end the outward direction; answers still arrive."""
        self._finishing = True
        if not self.closed and not self._unsent:
            self._flush()

    def close(self) -> None:
        """Drop both directions at once; safe to call twice."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self._unsent.clear()
        self._drained.set()

    def _flush(self) -> None:
        try:
            while self._unsent:
                sent = self._socket.send(self._unsent[0])
                self._unsent_bytes -= sent
                if sent == len(self._unsent[0]):
                    self._unsent.popleft()
                else:
                    self._unsent[0] = self._unsent[0][sent:]
            self._loop.remove_writer(self._socket)
            if self._finishing:
                self._socket.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            self._loop.add_writer(self._socket, self._flush)
        except OSError:
            # The peer is gone. What it sent before is still to be read, and its end is seen there.
            self._unsent.clear()
            self._unsent_bytes = 0
            self._loop.remove_writer(self._socket)
        if self._unsent_bytes > _HIGH_WATER_BYTES:
            self._drained.clear()
        else:
            self._drained.set()

    def _readable(self) -> None:
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            self._on_end(None)
            return
        try:
            for message in self._decoder.feed(data):
                self._on_message(message)
        except ProtocolError as error:
            self.close()
            self._on_end(error)
