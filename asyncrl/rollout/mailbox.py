"""The chunks of one request on their way from an engine to whoever iterates over them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from asyncrl.rollout.engine import Chunk


class Mailbox:
    """Holds chunks until they are read; `put` and `fail` never wait. One reader."""

    def __init__(self) -> None:
        self._items: asyncio.Queue[Chunk | Exception] = asyncio.Queue()
        self.finished = False
        """The last chunk, or an error, has been put in."""

    def put(self, chunk: Chunk) -> None:
        """Add a chunk; one with `finish` is the last."""
        self.finished = chunk.finish is not None
        self._items.put_nowait(chunk)

    def fail(self, error: Exception) -> None:
        """End the request with an error, raised after the chunks that came before it."""
        self.finished = True
        self._items.put_nowait(error)

    async def read(self) -> AsyncIterator[Chunk]:
        """Chunks in order until the last one. Waits for: the next chunk. Raises what `fail` was given."""
        while True:
            item = await self._items.get()
            if isinstance(item, Exception):
                raise item
            yield item
            if item.finish is not None:
                return
