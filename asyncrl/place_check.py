"""Whether what a run writes and connects has a place: its folder, shared memory, the loopback interface. Leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from pathlib import Path

from asyncrl.errors import ConfigError
from asyncrl.machine import existing_parent, free_bytes
from asyncrl.paths import shared_place

_LOOPBACK = "127.0.0.1"
_CONNECT_S = 5.0
LONGEST_SOCKET_FOLDER = 107 - len("/") - 36
"""The kernel takes 107 bytes of a socket's path; vLLM's ends in a UUID."""


def write_error(folder: Path) -> str:
    """Why nothing can be written to `folder`, or to the nearest one above it that exists; empty when something can."""
    place = existing_parent(folder)
    try:
        with contextlib.suppress(FileNotFoundError):
            folder.stat()
        with tempfile.TemporaryFile(dir=place):
            return ""
    except OSError as error:
        return f"{place}: {error.strerror or error}"


def check_run_folder(folder: Path, *, need_bytes: int) -> None:
    """Raise ConfigError unless `folder` can be written, or made, with room for `need_bytes`."""
    if error := write_error(folder):
        raise ConfigError("run.folder", value=str(folder), allowed="a folder that can be written, or made",
                          remedy=f"{error}. Set run.folder.")
    free = free_bytes(folder)
    if free < need_bytes:
        raise ConfigError("run.folder", value=f"{folder}, {shown_bytes(free)} free",
                          allowed=f"{shown_bytes(need_bytes)} for the exported model and its checkpoints",
                          remedy="Free some, or set run.folder to another disk.")


def check_shared_memory(need_bytes: int) -> None:
    """Raise ConfigError unless the place of published weights and batches can be written, with room for `need_bytes`."""
    place = shared_place()
    if error := write_error(place):
        raise ConfigError("shared memory", value=str(place), allowed="a folder that can be written: /dev/shm, else the temporary folder",
                          remedy=f"{error}. Mount a tmpfs at /dev/shm, or set TMPDIR.")
    free = free_bytes(place)
    if free < need_bytes:
        raise ConfigError("shared memory", value=f"{place}, {shown_bytes(free)} free",
                          allowed=f"{shown_bytes(need_bytes)} for two versions of the published weights and the batches since a checkpoint",
                          remedy="Give the container more (docker run --shm-size, or a tmpfs at /dev/shm), remove what lies there, or "
                                 "lower trainer.checkpoint_every_steps.")


def check_loopback() -> None:
    """Raise ConfigError unless a socket of this machine can be connected to on 127.0.0.1, at a port the kernel chooses."""
    try:
        with socket.create_server((_LOOPBACK, 0)) as server, socket.create_connection(server.getsockname(), timeout=_CONNECT_S):
            pass
    except OSError as error:
        raise ConfigError("loopback interface", value=_LOOPBACK, allowed="an address to bind and to connect to, at any free port",
                          remedy=f"{error.strerror or error}. Bring `lo` up (ip link set lo up), or free some ports.") from error


def check_socket_folder(folder: Path) -> None:
    """Raise ConfigError when the paths of vLLM's sockets, a folder and a UUID, would be longer than the kernel takes."""
    if len(os.fsencode(folder)) > LONGEST_SOCKET_FOLDER:
        raise ConfigError("TMPDIR", value=str(folder),
                          allowed=f"a path of at most {LONGEST_SOCKET_FOLDER} bytes: vLLM makes its sockets there",
                          remedy="Set TMPDIR, or VLLM_RPC_BASE_PATH, to a shorter one such as /tmp.")


def shown_bytes(count: int) -> str:
    """In gigabytes, or megabytes below one."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
