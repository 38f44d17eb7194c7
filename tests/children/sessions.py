"""What a reward may start that leaves its process group."""

from __future__ import annotations

import os
import signal


def in_a_session_of_its_own() -> int:
    """A process in a session of its own that waits for ever; its id, once it is there."""
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.write(told, b"x")
        signal.pause()
    os.read(ready, 1)
    return pid
