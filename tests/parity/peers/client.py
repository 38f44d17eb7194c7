"""Asks an adapter, in a process of another environment, for computations. Used by the parity tests and by benchmarks/correction.py."""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[2] / ".venv-peers"
PEERS = ("verl", "trl", "areal")

Arrays = dict[str, NDArray[Any]]


class PeerFailed(Exception):
    """A peer raised, died or was too slow; the message has its own words."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a computation gave, and what was measured if that was asked for."""

    arrays: Arrays
    seconds: tuple[float, ...]
    peak_bytes: int | None


class Peer:
    """A running adapter, a context manager. It dies with this process, and is killed when an answer takes longer than the time-out."""

    def __init__(self, python: Path, adapter: Path, *, timeout_s: float = 300.0) -> None:
        self._timeout_s = timeout_s
        self._folder = tempfile.TemporaryDirectory()
        self._log = Path(self._folder.name) / "log"
        self._replies, theirs = os.pipe()
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [python, adapter, str(theirs), str(os.getpid())], stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=[theirs],
                env=_inherited(), cwd=self._folder.name)
        os.close(theirs)

    @classmethod
    def of(cls, name: str) -> Peer:
        """The adapter of one of `PEERS`, in its environment."""
        return cls(python_of(name), HERE / f"{name}_adapter.py")

    def ask(self, computation: str, arrays: Arrays, *, settings: Mapping[str, Any] | None = None, repeats: int = 0, memory: bool = False,
            threads: int = 1) -> Answer:
        """The arrays it computes; with `repeats`, the seconds of each; with `memory`, the bytes it needs. Raises PeerFailed."""
        asked, answered = (Path(self._folder.name) / name for name in ("asked.npz", "answered.npz"))
        np.savez(asked, allow_pickle=False, **arrays)
        request = {"computation": computation, "settings": dict(settings or {}), "input": str(asked), "output": str(answered),
                   "repeats": repeats, "memory": memory, "threads": threads}
        reply = self._exchange(json.dumps(request) + "\n")
        with np.load(answered, allow_pickle=False) as given:
            return Answer({name: given[name] for name in given.files}, tuple(reply.get("seconds", ())), reply.get("peak_bytes"))

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=10.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._replies)
        self._folder.cleanup()

    def _exchange(self, line: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line.encode())
            self.process.stdin.flush()
        except BrokenPipeError:
            raise PeerFailed(f"it ended:\n{self._last_words()}") from None
        received = b""
        while not received.endswith(b"\n"):
            ready, _, _ = select.select([self._replies], [], [], self._timeout_s)
            if not ready:
                self.process.kill()
                raise PeerFailed(f"no answer within {self._timeout_s:g} s:\n{self._last_words()}")
            piece = os.read(self._replies, 1 << 16)
            if not piece:
                raise PeerFailed(f"it ended:\n{self._last_words()}")
            received += piece
        reply = json.loads(received)
        if "error" in reply:
            raise PeerFailed(reply["error"])
        return reply

    def _last_words(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-2000:]


def python_of(name: str) -> Path:
    """The interpreter of a peer's environment, whether or not it is there."""
    return ENVIRONMENTS / name / "bin" / "python"


def is_installed(name: str) -> bool:
    """Whether `make peers` has finished this one."""
    return (ENVIRONMENTS / name / ".installed").exists()


def padded(arrays: Arrays, *, lengths: NDArray[np.integer[Any]]) -> Arrays:
    """[N, max length] of [T] arrays, zeros after each sequence's end."""
    inside = np.arange(lengths.max(initial=0)) < lengths[:, None]
    rows = {name: np.zeros(inside.shape, dtype=values.dtype) for name, values in arrays.items()}
    for name, values in arrays.items():
        rows[name][inside] = values
    return rows


def packed(rows: NDArray[Any], *, lengths: NDArray[np.integer[Any]]) -> NDArray[Any]:
    """[T] of [N, L]: what `padded` added, gone."""
    return rows[np.arange(rows.shape[1]) < lengths[:, None]]


def _inherited() -> dict[str, str]:
    """Our environment without what would bring our packages into theirs."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
