"""Who takes part in a delivery: rank 0 asks, waits, and says when somebody is missing. Needs no torch.

Members meet at a socket in the run's own folder, which nobody else can open. A member that dies is seen at once, by the end of its line
or by the lock that it held; one that hangs, by the time-out.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

from asyncrl.errors import WeightSyncError
from asyncrl.paths import claim, is_claimed

_SOCKET = "deliveries.sock"
_LOOK_EVERY_S = 0.1
"""How often rank 0, while it waits for members, looks whether those that are not there are alive."""
_MARGIN_S = 1.0
"""That a member's time-out may end after rank 0's own, which began with the same collective."""


@dataclass(frozen=True, slots=True)
class Member:
    """How a member introduces itself."""

    delivery: str
    """What it wants to take part in."""
    name: str
    engine: str
    """Whose worker it is; empty: a trainer rank."""
    workers: int
    """That the engine has."""
    gpu: str
    """Its device, as no other process names another one; empty: the CPU."""
    group: str
    """The process group it is in, with whom: empty without one."""
    holds: Sequence[int] = ()
    """Numbers of the parts it can send."""


class Line:
    """A connection between a member and rank 0; one JSON object a line."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._file = sock, sock.makefile("rwb")

    def send(self, message: Mapping[str, Any]) -> None:
        """Raises OSError when the other is gone."""
        self._file.write(json.dumps(message).encode() + b"\n")
        self._file.flush()

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """Raises TimeoutError when the other says nothing, and ConnectionError when it is gone."""
        self._socket.settimeout(max(timeout_s, 1e-3))
        line = self._file.readline()
        if not line.endswith(b"\n"):
            raise ConnectionResetError("its process has ended")
        return dict(json.loads(line))

    def close(self) -> None:
        """The other sees an end."""
        with contextlib.suppress(OSError):
            self._file.close()
        self._socket.close()


def be_alive(folder: Path, member: str) -> IO[str]:
    """A file that says, until it is closed or the process ends, that an engine's worker is alive."""
    return claim(folder / quote(member, safe=""))


def connect(folder: Path, *, timeout_s: float) -> Line:
    """A line to rank 0. Raises WeightSyncError when there is none."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(timeout_s)
    try:
        with _address(folder) as address:
            sock.connect(address)
    except OSError as error:
        sock.close()
        raise WeightSyncError(f"trainer-0 is missing, which leads the delivery: {error}") from error
    return Line(sock)


class Meeting:
    """Rank 0's: opened once, before any engine is asked to fetch."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _SOCKET).unlink(missing_ok=True)  # of ranks that died
        self._listener = socket.socket(socket.AF_UNIX)
        with _address(folder) as address:
            self._listener.bind(address)
        (folder / _SOCKET).chmod(0o600)
        self._listener.listen(1024)
        weakref.finalize(self, self._listener.close)

    def gather(self, delivery: str, *, ranks: int, engines: Sequence[str], timeout_s: float) -> tuple[Guests, dict[str, str]]:
        """All who come, and why others are missing: the other `ranks` of the trainer, and every worker of `engines`."""
        deadline = time.monotonic() + timeout_s
        guests = Guests()
        missing: dict[str, str] = {}
        while wanted := [name for name in guests.lacking(ranks, engines) if name not in missing]:
            if time.monotonic() > deadline:
                missing |= dict.fromkeys(wanted, f"did not come within {timeout_s:g} s")
                break
            self._listener.settimeout(_LOOK_EVERY_S)
            with contextlib.suppress(TimeoutError):
                guests.add(Line(self._listener.accept()[0]), delivery)
                continue
            missing |= {name: "its process has ended" for name in wanted if name in engines and not self._is_alive(name)}
        return guests, missing

    def _is_alive(self, engine: str) -> bool:
        return is_claimed(self._folder / quote(worker_name(engine, 0), safe=""))


class Guests:
    """Who takes part beside rank 0."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self._lines: dict[str, Line] = {}

    def add(self, line: Line, delivery: str) -> None:
        """Take in who speaks on a new line, unless it came for another delivery, which is over."""
        try:
            member = Member(**line.receive(_MARGIN_S))
        except (OSError, ValueError, TypeError):
            line.close()
            return
        if member.delivery != delivery:
            line.close()
            return
        if member.name in self._lines:
            self._lines[member.name].close()
        self.members[member.name], self._lines[member.name] = member, line

    def lacking(self, ranks: int, engines: Sequence[str]) -> list[str]:
        """Ranks that are not here, and engines of which not every worker is."""
        here = [member.engine for member in self.members.values()]
        most = {member.engine: member.workers for member in self.members.values()}
        return [*(name for name in map(rank_name, range(1, ranks)) if name not in self.members),
                *(name for name in engines if here.count(name) < most.get(name, 1))]

    def engines(self) -> list[str]:
        """Those that still take part."""
        return sorted({member.engine for member in self.members.values()} - {""})

    def in_order(self) -> list[Member]:
        """Ranks first; the same whoever came first."""
        return sorted(self.members.values(), key=lambda member: (member.engine, len(member.name), member.name))

    def close(self) -> None:
        """Nobody takes part any more."""
        for name in list(self.members):
            self.dismiss(name)

    def send(self, message: Mapping[str, Any]) -> None:
        """To all. One that is gone is found when it is to answer."""
        for line in self._lines.values():
            with contextlib.suppress(OSError):
                line.send(message)

    def outcomes(self, timeout_s: float) -> tuple[list[str], dict[str, str]]:
        """Wait for everyone's answer. Workers that have all parts, who leave; and who is gone, and why."""
        deadline = time.monotonic() + timeout_s + _MARGIN_S
        done: list[str] = []
        lost: dict[str, str] = {}
        for name in list(self.members):
            try:
                answer = self._lines[name].receive(deadline - time.monotonic())
            except TimeoutError:
                lost[name] = f"said nothing for {timeout_s:g} s"
            except (OSError, ValueError) as error:
                lost[name] = str(error)
            else:
                done += [name] if answer["done"] and self.members[name].engine else []
        for name in (*done, *lost):
            self.dismiss(name)
        return done, lost

    def dismiss(self, name: str, why: str = "") -> None:
        """Somebody takes part no longer; `why` is told."""
        self.members.pop(name)
        line = self._lines.pop(name)
        with contextlib.suppress(OSError):
            if why:
                line.send({"over": True, "error": why})
        line.close()

    def dismiss_engines(self, missing: Mapping[str, str], why: str) -> None:
        """What is left of engines that are missing, or of which a worker is, takes part no longer."""
        for member in list(self.members.values()):
            if member.engine and any(name in missing for name in (member.engine, *self._workers_of(member))):
                self.dismiss(member.name, why)

    @staticmethod
    def _workers_of(member: Member) -> Iterator[str]:
        return (worker_name(member.engine, worker) for worker in range(member.workers))


def rank_name(rank: int) -> str:
    """Of a trainer rank."""
    return f"trainer-{rank}"


def worker_name(engine: str, worker: int) -> str:
    """Of an engine's worker."""
    return f"{engine}.{worker}"


@contextmanager
def _address(folder: Path) -> Iterator[str]:
    """Of the socket in a folder, however long its path is: an address has 107 bytes."""
    descriptor = os.open(folder, os.O_PATH)
    try:
        yield f"/proc/self/fd/{descriptor}/{_SOCKET}"
    finally:
        os.close(descriptor)
