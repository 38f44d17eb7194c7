"""The zygote: a process forked early, which forks workers that hold whatever the controller held then, closures included.

Nothing of the user's is ever pickled or imported again. The zygote itself runs none of the user's code and has one thread, so
forking stays safe however many threads the controller grows later. Zygote and workers die with the controller. What a worker
started dies with it, in a session of its own too; a process it detached (its parent ended before it), when the next worker ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import itertools
import os
import resource
import select
import signal
import socket
import stat
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from asyncrl.channel import Channel, ParentGone, pack, unpack
from asyncrl.errors import ChildDied
from asyncrl.process import adopt_orphans, child_pids, die_with_parent, last_lines, reap, require_main_thread
from asyncrl.rollout.bounded_log import BoundedLog

_FORK, _KILL, _EXITED = "fork", "kill", "exited"
_CONTROL_BYTES = 4096
_CONTROLLER_ENDED = signal.SIGRTMIN
"""What the kernel sends the zygote then: it has processes of the user's to end first, which nothing else ties to ours."""
_TICK_MS = 5000
"""How often the zygote looks for processes of the user's that ended after their parents, when nothing else wakes it."""
_OOM_SCORE = 500
"""Workers are what the kernel should kill first when the machine runs out of memory; 0 is neutral, 1000 the most."""


class Zygote:
    """The controller's side. `Zygote.fork` makes one; `spawn` and `kill` belong to the running loop."""

    def __init__(self, pid: int, *, control: socket.socket, log: Path) -> None:
        self.pid = pid
        self.log = log
        self.exit_reason: str | None = None
        """How the zygote ended; None while it lives."""
        self._control = control
        self._pidfd = os.pidfd_open(pid)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Future[None] | None = None
        self._ids = itertools.count(1)
        self._on_exit: dict[int, Callable[[str], None]] = {}
        self._closing = False

    @classmethod
    def fork(cls, main: Callable[[Channel], None], *, log: Path) -> Zygote:
        """Fork the zygote now; its workers run `main(channel)` on their only thread. Output goes to `log`.

        Call it before anything starts threads. Inherited sockets and pipes are closed in it, open files stay.
        The log has a bounded size.
        """
        require_main_thread()
        log.parent.mkdir(parents=True, exist_ok=True)
        controller_pid = os.getpid()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # closed under us: then nothing of it comes twice
                stream.flush()
        with warnings.catch_warnings():
            # Newer Pythons warn of every fork beside a thread. NumPy's BLAS keeps some, and stops them around a fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            _run_and_exit(lambda: _ZygoteProcess(theirs, main, log=log).run(controller_pid))
        theirs.close()
        return cls(pid, control=ours, log=log)

    def spawn(self, *, on_exit: Callable[[str], None], memory_bytes: int | None = None) -> tuple[int, socket.socket]:
        """Ask for a worker: its id, and the socket to it, usable at once. `on_exit` hears how it ended. Raises ChildDied.

        `memory_bytes` bounds the private memory it may allocate beyond what it inherits.
        """
        self._attach()
        if self.exit_reason is not None:
            raise ChildDied(self.exit_reason)
        worker_id = next(self._ids)
        ours, theirs = socket.socketpair()
        self._on_exit[worker_id] = on_exit
        with theirs:
            self._tell({"op": _FORK, "id": worker_id, "memory_bytes": memory_bytes}, [theirs.fileno()])
        return worker_id, ours

    def kill(self, worker_id: int) -> None:
        """SIGKILL a worker and what it started; nothing happens when it has ended."""
        if worker_id in self._on_exit:
            self._tell({"op": _KILL, "id": worker_id}, [])

    async def close(self, timeout_s: float = 5.0) -> None:
        """End every worker, then the zygote; returns when it is reaped. Safe to call twice."""
        self._attach()
        assert self._ended is not None
        if self.exit_reason is None:
            self._closing = True
            self._control.shutdown(socket.SHUT_WR)
            try:
                await asyncio.wait({self._ended}, timeout=timeout_s)
            finally:
                if self.exit_reason is None:
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            await asyncio.shield(self._ended)

    def _attach(self) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._ended = self._loop.create_future()
            self._loop.add_reader(self._control, self._hear)
            self._loop.add_reader(self._pidfd, self._zygote_ended)

    def _tell(self, message: dict[str, Any], descriptors: list[int]) -> None:
        # A zygote that is gone is seen through its pidfd, which then tells every worker's owner.
        with contextlib.suppress(ConnectionError):
            socket.send_fds(self._control, [pack(message)], descriptors)

    def _hear(self) -> None:
        try:
            data = self._control.recv(_CONTROL_BYTES, socket.MSG_DONTWAIT)
        except (BlockingIOError, ConnectionError):
            data = b""
        if not data:
            self._loop.remove_reader(self._control)
            return
        message = unpack(data)
        on_exit = self._on_exit.pop(message["id"], None)
        if on_exit is not None:
            on_exit(message["reason"])

    def _zygote_ended(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._loop.remove_reader(self._control)
        os.close(self._pidfd)
        self._control.close()
        how = reap(self.pid, asked=self._closing)
        self.exit_reason = f"the zygote (pid {self.pid}) that forks workers ended: {how}; {last_lines(self.log)}"
        waiting, self._on_exit = self._on_exit, {}
        for on_exit in waiting.values():
            on_exit(self.exit_reason)
        self._ended.set_result(None)


class _Worker:
    """What the zygote knows of one worker."""

    def __init__(self, worker_id: int, pid: int) -> None:
        self.id = worker_id
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.asked = False


class _ZygoteProcess:
    """The zygote's own side: one thread, one loop over the controller's socket and the workers' pidfds."""

    def __init__(self, control: socket.socket, main: Callable[[Channel], None], *, log: Path) -> None:
        self._control = control
        self._main = main
        self._log = BoundedLog(log)
        self._workers: dict[int, _Worker] = {}
        self._poll = select.poll()

    def run(self, controller_pid: int) -> None:
        """Serve until the controller closes its end; every worker is killed and reaped then."""
        die_with_parent(controller_pid)
        # Signals to the controller's group are the controller's to handle.
        os.setpgid(0, 0)
        # Objects of the controller must never be collected here: their finalizers would act on descriptors we reuse.
        gc.freeze()
        adopt_orphans()
        _reset_signals()
        _redirect_output(self._log)
        _close_inherited(keep=self._control.fileno())
        self._log.open_pipe()
        self._poll.register(self._log.reader, select.POLLIN)
        for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TOKENIZERS_PARALLELISM"):
            os.environ[variable] = "false" if variable == "TOKENIZERS_PARALLELISM" else "1"
        self._poll.register(self._control, select.POLLIN)
        with contextlib.suppress(ConnectionError, ParentGone):
            signal.signal(_CONTROLLER_ENDED, _controller_ended)
            die_with_parent(controller_pid, signum=_CONTROLLER_ENDED)
            while self._serve_once():
                pass
        signal.signal(_CONTROLLER_ENDED, signal.SIG_IGN)
        for worker in list(self._workers.values()):
            _kill_group(worker.pid)
            reap(worker.pid, asked=True)
        self._workers.clear()
        self._kill_orphans()
        self._log.drain()

    def _serve_once(self) -> bool:
        ready = {descriptor for descriptor, _ in self._poll.poll(_TICK_MS)}
        if self._log.reader in ready:
            self._log.pump()
        for descriptor in ready & self._workers.keys():
            self._bury(self._workers.pop(descriptor))
        self._reap_orphans()
        if self._control.fileno() not in ready:
            return True
        data, descriptors, _, _ = socket.recv_fds(self._control, _CONTROL_BYTES, 1)
        if not data:
            return False
        message = unpack(data)
        if message["op"] == _FORK:
            self._fork(message["id"], socket.socket(fileno=descriptors[0]), memory_bytes=message["memory_bytes"])
        for worker in self._workers.values():
            if message["op"] == _KILL and worker.id == message["id"]:
                worker.asked = True
                _kill_group(worker.pid)
        return True

    def _fork(self, worker_id: int, sock: socket.socket, *, memory_bytes: int | None) -> None:
        zygote_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self._report(worker_id, f"could not be forked: {error}")
            return
        finally:
            if os.getpid() == zygote_pid:
                sock.close()
        if pid == 0:
            _run_and_exit(lambda: self._run_worker(zygote_pid, sock, memory_bytes=memory_bytes))
        os.setpgid(pid, pid)
        worker = _Worker(worker_id, pid)
        self._workers[worker.pidfd] = worker
        self._poll.register(worker.pidfd, select.POLLIN)

    def _bury(self, worker: _Worker) -> None:
        self._poll.unregister(worker.pidfd)
        os.close(worker.pidfd)
        _kill_group(worker.pid)
        ended = reap(worker.pid, asked=worker.asked)
        self._kill_orphans()
        self._report(worker.id, str(ended))

    def _kill_orphans(self) -> None:
        """End what the user's code left behind: the kernel made us its parent. What such a process leaves behind follows."""
        while orphans := child_pids() - {worker.pid for worker in self._workers.values()}:
            for pid in orphans:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def _reap_orphans(self) -> None:
        """Let go of those that have ended by themselves."""
        workers = {worker.pid for worker in self._workers.values()}
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in workers:
                os.waitpid(ended.si_pid, 0)

    def _report(self, worker_id: int, reason: str) -> None:
        self._control.send(pack({"op": _EXITED, "id": worker_id, "reason": reason}))

    def _run_worker(self, zygote_pid: int, sock: socket.socket, *, memory_bytes: int | None) -> None:
        die_with_parent(zygote_pid)
        signal.signal(_CONTROLLER_ENDED, signal.SIG_DFL)
        os.setpgid(0, 0)
        self._log.attach_writer()
        self._control.close()
        for worker in self._workers.values():
            os.close(worker.pidfd)
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
        if memory_bytes is not None:
            # Private writable memory alone: address space that is only reserved, as many runtimes do by the gigabyte, costs nothing.
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            limit = _data_bytes() + memory_bytes
            resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
        with contextlib.suppress(ParentGone):
            self._main(Channel(sock))


def _controller_ended(signum: int, frame: object) -> NoReturn:
    raise ParentGone


def _kill_group(worker_pid: int) -> None:
    """SIGKILL a worker that is not yet reaped, and whatever processes the user's code started in it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker_pid, signal.SIGKILL)
    os.kill(worker_pid, signal.SIGKILL)


def _run_and_exit(main: Callable[[], None]) -> NoReturn:
    """Run `main` in a forked process and end it without unwinding into the code that forked."""
    code = 1
    try:
        main()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _reset_signals() -> None:
    """Default handlers, as in a fresh process, but Ctrl-C is the controller's to handle."""
    signal.set_wakeup_fd(-1)
    for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(signum)):
            signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    asyncio._set_running_loop(None)


def _redirect_output(log: BoundedLog) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    log.attach()
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    faulthandler.enable(file=sys.stderr)


def _close_inherited(*, keep: int) -> None:
    """Let go of sockets, pipes and event descriptors. Their numbers stay taken, so that a late close by a stale object hits nothing."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        if descriptor in (0, 1, 2, keep, nothing):
            continue
        with contextlib.suppress(OSError):
            mode = os.fstat(descriptor).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISCHR(mode)):
                os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)


def _data_bytes() -> int:
    """What RLIMIT_DATA counts already; the stack, which it does not, is in the figure too."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
