from __future__ import annotations

import asyncio
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.channel import ERROR, START_ID, Message, encode
from asyncrl.child import Child
from asyncrl.errors import ChildDied, ConfigError, ProtocolError, RemoteError, WrongBase
from asyncrl.process import Exit

TESTS = Path(__file__).parent
ENV = {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])}
BOUND_S = 30.0


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, BOUND_S))


async def start(logs: Path, *, timeout_s: float = BOUND_S, **spec: object) -> Child:
    return await Child.start("children.echo", name="echo", spec=spec, logs=logs, env=ENV, start_timeout_s=timeout_s)


def is_gone(pid: int, *, within_s: float) -> bool:
    """Whether a process, ours or not, ends within the bound."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], within_s)[0])
    finally:
        os.close(descriptor)


def own_children() -> str:
    """Process ids of this process's children, ended ones that nobody has reaped included."""
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text()


def test_a_child_gets_its_spec_and_answers_with_body_and_arrays(tmp_path) -> None:
    async def main() -> None:
        child = await start(tmp_path, size=3, nested={"a": [1, None]})
        assert child.ready == {"got": {"size": 3, "nested": {"a": [1, None]}}, "pid": child.pid}
        tokens = np.arange(6, dtype=np.int32).reshape(2, 3)
        reply = await child.call("echo", {"x": 1}, arrays={"tokens": tokens}, timeout_s=BOUND_S)
        assert reply.body == {"body": {"x": 1}, "deadline_s": BOUND_S}
        np.testing.assert_array_equal(reply.arrays["tokens"], tokens, strict=True)
        big = np.arange(3_000_000, dtype=np.float32)
        replies = await asyncio.gather(*(child.call("echo", arrays={"big": big[i:]}, timeout_s=BOUND_S) for i in range(4)))
        assert [len(reply.arrays["big"]) for reply in replies] == [3_000_000 - i for i in range(4)]
        np.testing.assert_array_equal(replies[3].arrays["big"], big[3:])
        child.notify("echo", {"ignored": True})
        await child.close()
        assert child.exit_reason.startswith("exit code 0, peak memory")
        assert not child.alive
        await child.close()

    run(main())


def test_a_set_up_that_fails_raises_its_own_error_and_leaves_no_process(tmp_path) -> None:
    async def main() -> None:
        with pytest.raises(WrongBase, match="the set-up holds base 3"):
            await start(tmp_path, set_up="fails")
        with pytest.raises(RemoteError, match=r"No module named 'children\.missing'"):
            await Child.start("children.missing", name="missing", spec={}, logs=tmp_path, env=ENV)
        with pytest.raises(TimeoutError, match=r"'echo' did not answer 'start' within 1 s; last lines of .*\n(.*\n)*about to hang"):
            await start(tmp_path / "hangs", set_up="hangs", timeout_s=1.0)

    before = own_children()
    run(main())
    assert own_children() == before


def test_errors_of_a_handler_come_back_as_their_class(tmp_path) -> None:
    async def main() -> None:
        child = await start(tmp_path)
        with pytest.raises(WrongBase) as raised:
            await child.call("raise", {"kind": "WrongBase"}, timeout_s=BOUND_S)
        assert str(raised.value) == "no such thing"
        assert "in _raise" in raised.value.__notes__[0]
        with pytest.raises(ConfigError, match=r"a\.b = 2 is not allowed: 1\. Take 1\.") as config:
            await child.call("raise", {"kind": "ConfigError"}, timeout_s=BOUND_S)
        assert config.value.field == "a.b"
        with pytest.raises(RemoteError, match=r"child 'echo': KeyError: 'no such thing'\nTraceback(.*\n)*.*in _raise"):
            await child.call("raise", {"kind": "KeyError"}, timeout_s=BOUND_S)
        with pytest.raises(ProtocolError, match="unknown operation 'lost'"):
            await child.call("lost", timeout_s=BOUND_S)
        assert (await child.call("echo", {"x": 2}, timeout_s=BOUND_S)).body["body"] == {"x": 2}
        await child.close()

    run(main())


def test_a_killed_child_is_noticed_with_how_and_why(tmp_path) -> None:
    async def main() -> None:
        child = await start(tmp_path)
        calls = [asyncio.create_task(child.call("never", timeout_s=BOUND_S)) for _ in range(3)]
        await asyncio.sleep(0)
        os.kill(child.pid, signal.SIGKILL)
        for result in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(result, ChildDied)
            assert f"child 'echo' (pid {child.pid}): killed by signal 9 (SIGKILL), probable out of memory, peak memory" in str(result)
        assert await child.wait_exit() == child.exit_reason
        with pytest.raises(ChildDied):
            child.notify("echo")
        with pytest.raises(ChildDied):
            await child.call("echo", timeout_s=BOUND_S)
        assert is_gone(child.pid, within_s=0)

    run(main())


def test_an_exit_is_told_with_its_code_and_its_last_words(tmp_path) -> None:
    async def main() -> None:
        child = await start(tmp_path)
        with pytest.raises(ChildDied, match=r"exit code 3, peak memory .* MB; last lines of .*echo\.log:\nlast words"):
            await child.call("die", {"code": 3}, timeout_s=BOUND_S)
        child = await start(tmp_path)
        with pytest.raises(ChildDied, match="exit code 3"):
            await child.call("die", {"code": 3, "leaves_another": True}, timeout_s=BOUND_S)
        child = await start(tmp_path)
        child.kill()
        assert (await child.wait_exit()).startswith("killed by signal 9 (SIGKILL), on request, peak memory")

    run(main())


def test_a_call_past_its_deadline_names_operation_and_child_and_is_cancelled(tmp_path) -> None:
    async def main() -> None:
        child = await start(tmp_path, mode="streams")
        with pytest.raises(TimeoutError, match=r"child 'echo' did not answer 'count' within 0\.01 s"):
            await child.call("count", {"parts": 0}, timeout_s=0.01)
        assert (await child.call("cancelled", timeout_s=BOUND_S)).body == {"ids": [1]}
        await child.close()

    run(main())


def test_an_answer_that_arrived_while_the_controller_was_busy_is_in_time(tmp_path) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        child = await start(tmp_path)

        def be_busy() -> None:
            assert select.select([child._connection._socket], [], [], BOUND_S)[0]
            real = loop.time
            loop.time = lambda: real() + 1000.0

        call = asyncio.create_task(child.call("echo", {"x": 1}, timeout_s=500.0))
        await asyncio.sleep(0)
        loop.call_soon(be_busy)
        assert (await call).body["body"] == {"x": 1}
        child.kill()
        await child.wait_exit()

    asyncio.run(main())


def test_a_stream_gives_its_parts_in_order_and_closing_it_cancels(tmp_path) -> None:
    async def main() -> None:
        child = await start(tmp_path, mode="streams")
        replies = [reply async for reply in child.stream("count", {"parts": 3}, arrays={"a": np.ones(2, np.float32)})]
        assert [reply.body["index"] for reply in replies] == [0, 1, 2]
        assert replies[2].arrays["a"].tolist() == [1.0, 1.0]
        endless = child.stream("endless")
        request_id = (await anext(endless)).body["id"]
        await endless.aclose()
        assert (await child.call("cancelled", timeout_s=BOUND_S)).body == {"ids": [request_id]}
        died = child.stream("endless")
        await anext(died)
        child.kill()
        with pytest.raises(ChildDied):
            await anext(died)

    run(main())


def test_two_thousand_streams_run_at_once(tmp_path) -> None:
    async def main() -> None:
        child = await start(tmp_path, mode="streams")

        async def total(index: int) -> int:
            parts = [r async for r in child.stream("count", {"parts": 5}, arrays={"a": np.array([index])})]
            assert [part.body["index"] for part in parts] == [0, 1, 2, 3, 4]
            return sum(int(part.arrays["a"][0]) for part in parts)

        assert await asyncio.gather(*(total(index) for index in range(2000))) == [5 * index for index in range(2000)]
        await child.close()

    run(main())


def test_a_signal_to_the_controllers_group_does_not_reach_a_child(tmp_path) -> None:
    async def main() -> None:
        child = await start(tmp_path)
        assert os.getpgid(child.pid) == child.pid != os.getpgrp()
        await child.close()

    run(main())


def test_a_child_ignores_ctrl_c_and_one_that_hangs_is_terminated(tmp_path) -> None:
    async def main() -> None:
        child = await start(tmp_path)
        await child.call("sigint", timeout_s=BOUND_S)
        hung = asyncio.create_task(child.call("never", timeout_s=BOUND_S))
        await asyncio.sleep(0)
        await child.close(timeout_s=0.05)
        assert child.exit_reason.startswith("killed by signal 15 (SIGTERM), on request")
        with pytest.raises(ChildDied):
            await hung

    run(main())


def test_a_child_that_sends_a_pickle_is_killed_and_nothing_is_loaded(tmp_path) -> None:
    class Touch:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "created"),)

    async def main() -> None:
        child = await start(tmp_path)
        with pytest.raises(ChildDied, match="sent a malformed message"):
            await child.call("write", {"data": pickle.dumps(Touch(), protocol=4) + b"\0" * 64}, timeout_s=BOUND_S)
        assert not (tmp_path / "created").exists()

    run(main())


def test_a_child_that_sends_half_an_error_is_killed_and_nobody_waits_for_the_rest(tmp_path) -> None:
    async def main() -> None:
        child = await start(tmp_path)
        with pytest.raises(ChildDied, match="sent a malformed message"):
            await child.call("write", {"data": b"".join(encode(Message(ERROR, START_ID + 1, {})))}, timeout_s=BOUND_S)

    run(main())


def test_children_start_from_the_main_thread_alone(tmp_path) -> None:
    caught: list[BaseException] = []

    def elsewhere() -> None:
        try:
            run(start(tmp_path))
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(timeout=BOUND_S)
    assert "main thread" in str(caught[0])


def test_kill_9_of_the_controller_leaves_no_child_zygote_or_worker_nor_what_a_reward_started(tmp_path) -> None:
    with subprocess.Popen([sys.executable, str(TESTS / "children" / "controller.py"), str(tmp_path)], stdout=subprocess.PIPE,
                          env={**os.environ, **ENV}) as controller:
        try:
            pids = json.loads(controller.stdout.readline())
        finally:
            controller.kill()
    assert len(set(pids)) == 4
    assert all(is_gone(pid, within_s=5.0) for pid in pids)


def test_processes_and_rewards_need_no_torch() -> None:
    code = "import sys, asyncrl.child, asyncrl.rollout.reward; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, **ENV}, timeout=BOUND_S, check=False).returncode == 0


def test_a_real_time_signal_has_a_number_alone() -> None:
    assert "killed by signal 40 (signal 40), peak" in str(Exit(code=-40, peak_bytes=1, asked=False))
