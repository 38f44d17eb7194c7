"""Whatever a reward does, it costs its own rollout, under a name, and the run when it does so too often. Real workers, no mocks."""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.accounting import Ledger
from asyncrl.errors import ChildDied, RunAborted
from asyncrl.rollout.env import SingleTurn
from asyncrl.rollout.worker import RolloutWorker
from asyncrl.tokenizer import Tokenizer
from asyncrl.types import Prompt, Rollout, Sampling, Status
from tests.rollout.rollout_fakes import ScriptedEngine, chunk, router_of, write_tokenizer

BOUND_S = 120.0
TIMEOUT_S = 1.0
"""Where a reward that hangs is waited for. Elsewhere nothing should be killed by the clock, however busy the machine."""
LARGEST_LOG_BYTES = 2 * 8 * 2**20


def raises() -> object:
    raise ValueError("x is not a number")


def raises_a_book() -> object:
    raise ValueError("x" * 10**6)


class Unshown(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not I")


def raises_what_cannot_be_shown() -> object:
    raise Unshown


def recurses() -> object:
    return recurses()


def hangs_deaf() -> object:
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(signum, signal.SIG_IGN)
    while True:
        time.sleep(1000.0)


def allocates() -> object:
    held = []
    while True:
        held.append(bytearray(2**24))


def prints() -> object:
    while True:
        print("x" * 10_000)


def closes_everything() -> object:
    os.closerange(3, 1000)
    return 1.0


def hangs_beside_a_process_in_a_session_of_its_own() -> object:
    if os.fork() == 0:
        os.setsid()
        Path("started").write_text(str(os.getpid()))
    while True:
        time.sleep(1000.0)


def kills_the_zygote() -> object:
    os.kill(os.getppid(), signal.SIGKILL)
    return hangs_deaf()


ERROR, TIMEOUT = Status.REWARD_ERROR, Status.REWARD_TIMEOUT
BAD: list[tuple[Callable[[], object], Status, str]] = [
    (raises, ERROR, "reward 'f' raised ValueError: x is not a number"),
    (raises_a_book, ERROR, "xxx… (1000000 characters)"),
    (raises_what_cannot_be_shown, ERROR, "reward 'f' raised Unshown: <RuntimeError when shown>"),
    (recurses, ERROR, "reward 'f' raised RecursionError"),
    (lambda: sys.exit(4), ERROR, "reward 'f' raised SystemExit: 4"),
    (lambda: os._exit(3), ERROR, "reward 'f' ended its worker: exit code 3"),
    (lambda: os.kill(os.getpid(), signal.SIGKILL), ERROR, "reward 'f' ended its worker: killed by signal 9 (SIGKILL)"),
    (lambda: ctypes.string_at(0), ERROR, "reward 'f' ended its worker: killed by signal 11 (SIGSEGV)"),
    (closes_everything, ERROR, "reward 'f' ended its worker"),
    (allocates, ERROR, "reward 'f' raised MemoryError:  (what a worker may take is env.memory_bytes)"),
    (lambda: None, ERROR, "reward 'f' returned None (NoneType)"), (lambda: math.nan, ERROR, "reward 'f' returned nan (float)"),
    (lambda: -math.inf, ERROR, "reward 'f' returned -inf (float)"), (lambda: "1.0", ERROR, "reward 'f' returned '1.0' (str)"),
    (lambda: [1.0, 2.0], ERROR, "reward 'f' returned [1.0, 2.0] (list)"),
    (lambda: {"f": 1.0}, ERROR, "reward 'f' returned {'f': 1.0} (dict)"),
    (hangs_deaf, TIMEOUT, "reward 'f' ran longer than 1 s"), (prints, TIMEOUT, "reward 'f' ran longer than 1 s"),
    (hangs_beside_a_process_in_a_session_of_its_own, TIMEOUT, "reward 'f' ran longer than 1 s")]
NAMES = ["raises", "a book", "unshown", "recurses", "sys.exit", "os._exit", "kill -9", "segfault", "closes", "allocates", "None", "nan",
         "inf", "str", "list", "dict", "hangs", "prints", "leaves"]


class Scene:
    """Rollouts of one token judged by a reward that misbehaves for prompts called `bad`."""

    def __init__(self, folder: Path, bad: Callable[[], object], *, error_budget: float, timeout_s: float = TIMEOUT_S) -> None:
        def f(prompt: Prompt, completion: str) -> Any:
            return bad() if prompt.prompt_id == "bad" else raises() if prompt.prompt_id == "raises" else 1.0

        self.ledger = Ledger()
        self.env = SingleTurn({"f": f}, workers=1, timeout_s=timeout_s, memory_bytes=2**26)
        self.env.start(folder, Tokenizer(write_tokenizer(folder)))
        self._budget = error_budget
        self._count = 0

    async def run(self, prompt_id: str) -> Rollout:
        if not self._count:
            engine = ScriptedEngine(*[[chunk(4, finish=Status.STOP)]] * 100)
            self.worker = RolloutWorker(await router_of(engine), self.env, sampling=Sampling(), ledger=self.ledger, seed=0,
                                        error_budget=self._budget)
        self._count += 1
        rollout = await self.worker.run(Prompt(tokens=(3,), prompt_id=prompt_id), group_id=self._count, index=0)
        self.ledger.completed(rollout)
        return rollout


@pytest.mark.parametrize(("bad", "status", "text"), BAD, ids=NAMES)
def test_a_bad_reward_costs_its_rollout_and_over_the_budget_the_run(bad: Callable[[], object], status: Status, text: str, tmp_path: Path,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    async def main() -> None:
        scene = Scene(tmp_path, bad, error_budget=1 / 64, timeout_s=TIMEOUT_S if status is TIMEOUT else BOUND_S)
        try:
            rollouts = [await scene.run(name) for name in ("good", "bad", "good")]
            assert [rollout.status for rollout in rollouts] == [Status.STOP, status, Status.STOP]
            assert [rollout.rewards for rollout in rollouts] == [{"f": 1.0}, {}, {"f": 1.0}]
            assert text in rollouts[1].error
            assert not rollouts[1].sequences[0].loss_mask.any()
            with pytest.raises(RunAborted, match=rf"^2 of the last 4 rollouts failed[\s\S]*: 2 {status.value}\. ") as ended:
                await scene.run("bad")
            assert text in str(ended.value)
            account = scene.ledger.check(buffered=(3, 3), in_flight=scene.worker.in_flight())
            assert account.dropped["run_failed"].rollouts == 1
        finally:
            await scene.env.close()

    asyncio.run(asyncio.wait_for(main(), BOUND_S))
    assert sum(path.stat().st_size for path in tmp_path.glob("rewards.log*")) <= LARGEST_LOG_BYTES
    if bad is hangs_beside_a_process_in_a_session_of_its_own:
        assert not Path("/proc", Path("started").read_text()).exists()


def test_a_reward_that_only_hangs_ends_the_run_long_before_the_budget_would(tmp_path: Path) -> None:
    async def main() -> None:
        scene = Scene(tmp_path, hangs_deaf, error_budget=0.9)
        try:
            assert [(await scene.run("bad")).status for _ in range(3)] == [TIMEOUT] * 3
            with pytest.raises(RunAborted, match=r"no judgement has ended for 4 times env\.timeout_s"):
                await scene.run("bad")
        finally:
            await scene.env.close()

    asyncio.run(asyncio.wait_for(main(), BOUND_S))


def test_a_reward_that_raises_between_hangs_shows_that_it_does_not_only_hang(tmp_path: Path) -> None:
    async def main() -> None:
        scene = Scene(tmp_path, hangs_deaf, error_budget=0.9)
        try:
            ended = [(await scene.run(name)).status for name in ("bad", "bad", "bad", "raises", "bad", "bad")]
            assert ended == [TIMEOUT] * 3 + [ERROR] + [TIMEOUT] * 2
        finally:
            await scene.env.close()

    asyncio.run(asyncio.wait_for(main(), BOUND_S))


def test_a_zygote_that_is_killed_ends_the_run(tmp_path: Path) -> None:
    async def main() -> None:
        scene = Scene(tmp_path, kills_the_zygote, error_budget=0.5)
        try:
            with pytest.raises(ChildDied, match="the zygote"):
                await scene.run("bad")
        finally:
            await scene.env.close()

    asyncio.run(asyncio.wait_for(main(), BOUND_S))
