from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from asyncrl.channel import Channel, Message
from asyncrl.connection import Connection
from asyncrl.errors import ChildDied
from asyncrl.rollout.zygote import Zygote
from tests.children.sessions import in_a_session_of_its_own

BOUND_S = 30.0


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, BOUND_S))


def is_gone(pid: int) -> bool:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 5.0)[0])
    finally:
        os.close(descriptor)


def answering(answer: Callable[[], object]) -> Callable[[Channel], None]:
    """A worker that answers each request with what `answer` gives."""
    def main(channel: Channel) -> None:
        while True:
            channel.reply(channel.recv().id, {"answer": answer()})
    return main


class Caller:
    """One worker of a zygote, and how it ended."""

    def __init__(self, zygote: Zygote) -> None:
        self.exit: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.answers: asyncio.Queue[Message] = asyncio.Queue()
        self.id, sock = zygote.spawn(on_exit=self.exit.set_result)
        self.connection = Connection(sock, on_message=self.answers.put_nowait, on_end=lambda error: None)

    async def ask(self) -> object:
        self.connection.send(Message("ask", 1))
        return (await self.answers.get()).body["answer"]


def test_workers_hold_the_closures_and_open_files_of_the_controller_but_not_its_sockets(tmp_path) -> None:
    secret = {"value": 41}
    (tmp_path / "file").write_text("content")

    async def main() -> None:
        with (tmp_path / "file").open() as file, socket.socket() as inherited:
            number = inherited.fileno()

            def answer() -> object:
                secret["value"] += 1
                with socket.socket() as own:
                    is_taken = own.fileno() != number
                return [secret["value"], file.read(), os.path.realpath(f"/proc/self/fd/{number}"), is_taken, threading.active_count()]

            zygote = Zygote.fork(answering(answer), log=tmp_path / "log")
            workers = [Caller(zygote), Caller(zygote)]
            assert await workers[0].ask() == [42, "content", "/dev/null", True, 1]
            assert (await workers[0].ask())[0] == 43
            assert (await workers[1].ask())[0] == 42
            await zygote.close()
            assert inherited.fileno() == number
            inherited.bind(("127.0.0.1", 0))
        assert secret == {"value": 41}
        for worker in workers:
            worker.connection.close()

    run(main())


def test_the_controllers_loop_goes_on_after_the_fork(tmp_path) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            heard = asyncio.Event()
            loop.add_reader(ours, heard.set)
            zygote = Zygote.fork(answering(os.getpid), log=tmp_path / "log")
            worker = Caller(zygote)
            assert await worker.ask() not in (os.getpid(), zygote.pid)
            theirs.send(b"x")
            await heard.wait()
            loop.remove_reader(ours)
        await zygote.close()
        assert "exit code 0" in worker.exit.result()
        worker.connection.close()

    run(main())


@pytest.mark.parametrize(("end", "reason"), [
    (lambda: os._exit(3), "exit code 3, peak memory "),
    (lambda: os.kill(os.getpid(), signal.SIGKILL), "killed by signal 9 (SIGKILL), probable out of memory, peak memory "),
    (lambda: os.kill(os.getpid(), signal.SIGTERM), "killed by signal 15 (SIGTERM), peak memory "),
    (lambda: 1 / 0, "exit code 1, peak memory "),
])
def test_the_end_of_a_worker_is_told_with_its_cause(tmp_path, end: Callable[[], object], reason: str) -> None:
    async def main() -> None:
        zygote = Zygote.fork(answering(end), log=tmp_path / "log")
        worker, other = Caller(zygote), Caller(zygote)
        worker.connection.send(Message("ask", 1))
        assert (await worker.exit).startswith(reason)
        assert not other.exit.done()
        zygote.kill(other.id)
        assert (await other.exit).startswith("killed by signal 9 (SIGKILL), on request")
        zygote.kill(other.id)
        await zygote.close()
        await zygote.close()

    run(main())


def test_output_of_a_worker_goes_to_the_log(tmp_path) -> None:
    async def main() -> None:
        zygote = Zygote.fork(answering(lambda: print("a line of the worker")), log=tmp_path / "logs" / "log")
        worker = Caller(zygote)
        await worker.ask()
        await zygote.close()
        worker.connection.close()

    run(main())
    assert (tmp_path / "logs" / "log").read_text() == "a line of the worker\n"


def test_a_signal_to_the_controllers_group_reaches_neither_zygote_nor_worker(tmp_path) -> None:
    async def main() -> None:
        zygote = Zygote.fork(answering(os.getpgrp), log=tmp_path / "log")
        worker = Caller(zygote)
        assert len({await worker.ask(), os.getpgid(zygote.pid), os.getpgrp()}) == 3
        await zygote.close()
        worker.connection.close()

    run(main())


def test_a_worker_is_what_the_kernel_kills_first_when_memory_runs_out(tmp_path) -> None:
    def oom_score() -> int:
        return int(Path("/proc/self/oom_score_adj").read_text())

    async def main() -> None:
        zygote = Zygote.fork(answering(oom_score), log=tmp_path / "log")
        worker = Caller(zygote)
        assert await worker.ask() == 500 > oom_score()
        await zygote.close()
        worker.connection.close()

    run(main())


def test_workers_die_with_their_zygote_and_everyone_is_told(tmp_path) -> None:
    async def main() -> None:
        zygote = Zygote.fork(answering(os.getpid), log=tmp_path / "log")
        worker = Caller(zygote)
        pid = await worker.ask()
        os.kill(zygote.pid, signal.SIGKILL)
        assert "the zygote" in await worker.exit
        assert "killed by signal 9 (SIGKILL), probable out of memory" in zygote.exit_reason
        assert is_gone(pid)
        with pytest.raises(ChildDied, match="the zygote"):
            Caller(zygote)
        await zygote.close()

    run(main())


def forked() -> int:
    """A process of the worker's that waits for ever."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
    return pid


def detached() -> int:
    """The same, and its parent ends at once."""
    ready, told = os.pipe()
    between = os.fork()
    if between == 0:
        os.setsid()
        pid = os.fork()
        if pid:
            os.write(told, str(pid).encode())
            os._exit(0)
        signal.pause()
    os.waitpid(between, 0)
    return int(os.read(ready, 20))


@pytest.mark.parametrize("start_another", [forked, in_a_session_of_its_own, detached])
def test_a_worker_takes_what_it_started_with_it(tmp_path, start_another: Callable[[], int]) -> None:

    async def main() -> None:
        zygote = Zygote.fork(answering(start_another), log=tmp_path / "log")
        killed, closed = Caller(zygote), Caller(zygote)
        pids = [await killed.ask(), await closed.ask()]
        zygote.kill(killed.id)
        await killed.exit
        assert is_gone(pids[0])
        await zygote.close()
        assert is_gone(pids[1])

    run(main())
