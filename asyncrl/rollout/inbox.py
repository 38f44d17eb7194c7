"""The controller's requests to a child that lives on an asyncio loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading

from asyncrl.channel import Channel, ParentGone, Request


def inbox_of(channel: Channel) -> asyncio.Queue[Request | None]:
    """Requests of the controller, read by a thread; None when no more can come."""
    loop, inbox = asyncio.get_running_loop(), asyncio.Queue[Request | None]()

    def read() -> None:
        try:
            with contextlib.suppress(ParentGone, RuntimeError):
                while True:
                    loop.call_soon_threadsafe(inbox.put_nowait, channel.recv())
        finally:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(inbox.put_nowait, None)

    threading.Thread(target=read, daemon=True).start()
    return inbox
