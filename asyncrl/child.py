"""Child processes: `python -m asyncrl.child MODULE` runs `MODULE.serve(channel, spec)`; `Child` is the controller's side.

The two ends of a socket pair are the only way in. A child is in a process group of its own, so that Ctrl-C, and a SIGTERM to the
controller's group (by `timeout`, by a scheduler), are the controller's to handle. It dies with the controller, kill -9 included. Its
output goes to `logs/NAME.log`. Its end is noticed at once, with how and why.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import importlib
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from asyncrl.channel import CANCEL, CLOSE, ERROR, NOTICE_ID, PART, START_ID, Channel, Message, ParentGone, Reply
from asyncrl.connection import Connection
from asyncrl.errors import ChildDied, ProtocolError, rebuild_error
from asyncrl.process import Exit, die_with_parent, last_lines, peak_memory_bytes, reap, require_main_thread

_SETTLE_S = 1.0
"""Between the end of a process and the end of its socket, in either order; they differ only when something is wrong."""
_STARTER = "ASYNCRL_STARTER_PID"
"""Names, in the environment of whatever a child starts, the process that starts it; once that has died, the kernel no longer tells."""
_TERMINATE_S = 0.5
"""What a child gets between SIGTERM and SIGKILL."""

_Answer = tuple[bool, Reply] | Exception
"""Whether it is the last, and the reply; or how the request failed."""


class Child:
    """A running child process. Belongs to the loop it was started on; `Child.start` makes one."""

    def __init__(self, name: str, *, process: subprocess.Popen[bytes], sock: socket.socket, log: Path) -> None:
        self.name = name
        self.pid = process.pid
        self.ready: Mapping[str, Any] = {}
        """What `serve` said with `channel.ready(body)`."""
        self.exit_reason: str | None = None
        """How the process ended, with the last lines of its log; None while it lives."""
        self._process = process
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(START_ID)
        self._pending: dict[int, asyncio.Queue[_Answer]] = {}
        self._exit: Exit | None = None
        self._ended = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._inherited_bytes = peak_memory_bytes()
        self._asked = self._closing = False
        self._fault = ""
        self._connection = Connection(sock, on_message=self._receive, on_end=self._socket_ended)
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._pidfd, self._process_ended)

    @classmethod
    async def start(cls, module: str, *, name: str, spec: Mapping[str, Any], logs: Path, env: Mapping[str, str] | None = None,
                    start_timeout_s: float = 120.0) -> Child:
        """Start `module` with `spec` and wait until it says ready. `env` is added to the controller's environment.

        Raises TimeoutError, ChildDied, or the error that the module's set-up raised; no process is left then.
        """
        require_main_thread()
        child = _spawn(module, name=name, log=logs / f"{name}.log", env=env)
        try:
            child.ready = (await child.call("start", {"spec": spec, "path": _import_path()}, timeout_s=start_timeout_s)).body
        except BaseException as error:
            child.kill()
            await child.wait_exit()
            if type(error) is TimeoutError:
                raise TimeoutError(f"{error}; {last_lines(child._log)}") from None
            raise
        return child

    @property
    def alive(self) -> bool:
        """Whether the process still runs, as far as is known."""
        return self._exit is None

    async def call(self, op: str, body: Mapping[str, Any] | None = None, *, arrays: Mapping[str, NDArray[Any]] | None = None,
                   timeout_s: float) -> Reply:
        """One request, one reply. Arrays of the reply are the caller's own.

        Raises TimeoutError, ChildDied, the child's own error when it is one of ours, RemoteError for any other.
        """
        with self._request(op, body, arrays=arrays, deadline_s=timeout_s) as answers:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._connection.drain()
                    answer = await answers.get()
            except TimeoutError:
                # A controller that was busy past the deadline finds the answer already here.
                if answers.empty():
                    raise TimeoutError(f"child {self.name!r} did not answer {op!r} within {timeout_s:g} s") from None
                answer = answers.get_nowait()
            return _unwrap(answer)[1]

    async def stream(self, op: str, body: Mapping[str, Any] | None = None, *,
                     arrays: Mapping[str, NDArray[Any]] | None = None) -> AsyncIterator[Reply]:
        """One request, replies as they come, until the last one. Sent at the first iteration.

        Closing the iterator early sends a `cancel` notice with the id of the request. Raises as `call`, without time limit.
        """
        with self._request(op, body, arrays=arrays) as answers:
            await self._connection.drain()
            last = False
            while not last:
                last, reply = _unwrap(await answers.get())
                yield reply

    def notify(self, op: str, body: Mapping[str, Any] | None = None) -> None:
        """A request that gets no answer. Raises ChildDied when the child is known to be gone."""
        self._require_open()
        self._connection.send(Message(op, NOTICE_ID, body or {}))

    def kill(self) -> None:
        """SIGKILL; nothing happens when the process has ended."""
        self._signal(signal.SIGKILL)

    async def wait_exit(self) -> str:
        """Waits for the end of the process, reaped; gives `exit_reason`."""
        return await asyncio.shield(self._ended)

    async def close(self, timeout_s: float = 2.0) -> None:
        """Ask the child to end, then SIGTERM, then SIGKILL; returns when it is reaped. Safe to call twice."""
        if self.alive:
            self._closing = True
            self._connection.send(Message(CLOSE))
            self._connection.finish()
            try:
                for wait_s, signum in ((timeout_s, signal.SIGTERM), (_TERMINATE_S, signal.SIGKILL)):
                    done, _ = await asyncio.wait({self._ended}, timeout=wait_s)
                    if not done:
                        self._signal(signum)
            except asyncio.CancelledError:
                self.kill()
                raise
        await self.wait_exit()

    @contextlib.contextmanager
    def _request(self, op: str, body: Mapping[str, Any] | None, *, arrays: Mapping[str, NDArray[Any]] | None,
                 deadline_s: float | None = None) -> Iterator[asyncio.Queue[_Answer]]:
        """Send a request; its answers arrive in the queue. Leaving before the last one cancels it in the child."""
        self._require_open()
        request_id = next(self._ids)
        answers: asyncio.Queue[_Answer] = asyncio.Queue()
        self._connection.send(Message(op, request_id, body or {}, arrays or {}, deadline_s))
        self._pending[request_id] = answers
        try:
            yield answers
        finally:
            if self._pending.pop(request_id, None) is not None:
                self._connection.send(Message(CANCEL, request_id))

    def _receive(self, message: Message) -> None:
        answers = self._pending.get(message.id)
        if answers is None:
            return
        last = message.op != PART
        answer: _Answer = (rebuild_error(message.body, where=f"child {self.name!r}") if message.op == ERROR
                           else (last, Reply(message.body, message.arrays)))
        if last:
            del self._pending[message.id]
        answers.put_nowait(answer)

    def _require_open(self) -> None:
        if self.exit_reason is not None:
            raise ChildDied(self._obituary())
        if self._closing:
            raise ChildDied(f"child {self.name!r} is being closed")

    def _signal(self, signum: signal.Signals) -> None:
        if self.alive:
            self._asked = True
            signal.pidfd_send_signal(self._pidfd, signum)

    def _process_ended(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._exit = reap(self.pid, asked=self._asked, inherited_bytes=self._inherited_bytes)
        self._process.returncode = self._exit.code
        if self._connection.closed:
            self._finish()
        else:
            self._timer = self._loop.call_later(_SETTLE_S, self._finish)

    def _socket_ended(self, error: ProtocolError | None) -> None:
        if error is not None:
            self._fault = f"sent a malformed message ({error}), then "
            self.kill()
        elif not self.alive:
            self._finish()
        elif not self._closing:
            self._timer = self._loop.call_later(_SETTLE_S, self._abandon)

    def _abandon(self) -> None:
        self._fault = "closed its socket and went on, then "
        self.kill()

    def _finish(self) -> None:
        """The process is reaped and all it sent is read: tell everyone who waits."""
        if self.exit_reason is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._connection.close()
        self.exit_reason = f"{self._fault}{self._exit}; {last_lines(self._log)}"
        for answers in self._pending.values():
            answers.put_nowait(ChildDied(self._obituary()))
        self._pending.clear()
        self._ended.set_result(self.exit_reason)

    def _obituary(self) -> str:
        return f"child {self.name!r} (pid {self.pid}): {self.exit_reason}"


def main(argv: list[str]) -> None:
    """The child's entry: MODULE, the number of the inherited socket, the controller's process id."""
    module, descriptor, parent_pid = argv
    die_with_parent(int(parent_pid))
    os.environ[_STARTER] = str(os.getpid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    sock = socket.socket(fileno=int(descriptor))
    sock.set_inheritable(False)
    channel = Channel(sock)
    try:
        hello = channel.recv().body
        sys.path[:] = list(dict.fromkeys([*hello["path"], *sys.path]))
        importlib.import_module(module).serve(channel, hello["spec"])
    except ParentGone:
        return
    except Exception as error:
        if not channel.is_ready:
            channel.fail(START_ID, error)
        raise


def _spawn(module: str, *, name: str, log: Path, env: Mapping[str, str] | None) -> Child:
    ours, theirs = socket.socketpair()
    log.parent.mkdir(parents=True, exist_ok=True)
    with theirs, log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "asyncrl.child", module, str(theirs.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=(theirs.fileno(),), process_group=0,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})})
    return Child(name, process=process, sock=ours, log=log)


def _import_path() -> list[str]:
    return [os.path.abspath(entry) for entry in sys.path]


def _unwrap(answer: _Answer) -> tuple[bool, Reply]:
    if isinstance(answer, Exception):
        raise answer
    return answer


if __name__ == "__main__":
    main(sys.argv[1:])
elif __name__ == "__mp_main__":
    # what a child starts with multiprocessing, as vLLM does, imports this module first of all
    die_with_parent(int(os.environ[_STARTER]))
    os.environ[_STARTER] = str(os.getpid())
