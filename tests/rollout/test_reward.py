from __future__ import annotations

import asyncio
import functools
import math
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from asyncrl.errors import ChildDied, ConfigError, RewardError, RewardTimeout, RunAborted
from asyncrl.rollout.reward import RewardPool
from asyncrl.types import Prompt

BOUND_S = 30.0
PROMPT = Prompt(text="1+1=", tokens=(1, 2), columns={"answer": "2", "level": np.int64(3)}, source="sums", prompt_id="p7")


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, BOUND_S))


def judge(tmp_path, reward: Any, completions: list[str], *, prompt: Prompt = PROMPT, **options: Any) -> list[Any]:
    """Rewards or errors of the completions, judged at the same time by one pool."""
    results: list[Any] = []

    async def main() -> None:
        pool = RewardPool(reward if isinstance(reward, dict) else {"f": reward}, **options)
        pool.start(tmp_path)
        scores = (pool.score(prompt, completion, [5, 6]) for completion in completions)
        results.extend(await asyncio.gather(*scores, return_exceptions=True))
        await pool.close()

    run(main())
    return results


def test_closures_lambdas_objects_and_coroutines_are_rewards(tmp_path) -> None:
    bonus = 0.25

    def closure(prompt: Prompt, completion: str) -> float:
        return bonus + (completion == prompt.columns["answer"])

    async def waits(prompt: Prompt, completion: str) -> float:
        await asyncio.sleep(0)
        return prompt.columns["level"]

    class Judge:
        def __call__(self, prompt: Prompt, completion: str) -> bool:
            return prompt == Prompt("1+1=", (1, 2), {"answer": "2", "level": 3}, "sums", "p7")

    rewards = {"closure": closure, "lambda": lambda prompt, completion: len(completion), "waits": waits, "object": Judge(),
               "partial": functools.partial(lambda scale, prompt, completion: scale, 2.0), "builtin": lambda *args: np.float32(1.5)}
    assert judge(tmp_path, rewards, ["2", "22"]) == [
        {"closure": 1.25, "lambda": 1.0, "waits": 3.0, "object": 1.0, "partial": 2.0, "builtin": 1.5},
        {"closure": 0.25, "lambda": 2.0, "waits": 3.0, "object": 1.0, "partial": 2.0, "builtin": 1.5}]


def test_trl_signatures_get_lists_of_one_and_the_columns_they_name(tmp_path) -> None:
    def everything(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        assert (prompts, kwargs) == (["1+1="], {"completion_ids": [[5, 6]], "answer": ["2"], "level": [3]})
        return [float(len(completions[0]))]

    def some(completions: list[str], answer: list[str]) -> np.ndarray:
        return np.array([a == c for a, c in zip(answer, completions, strict=True)])

    assert judge(tmp_path, {"everything": everything, "some": some}, ["2", "10"]) == [
        {"everything": 1.0, "some": 1.0}, {"everything": 2.0, "some": 0.0}]


CHAT = Prompt(text="<rendered>", tokens=(1, 2), columns={"answer": "4"}, messages=({"role": "system", "content": "Add."},
                                                                                  {"role": "user", "content": "2+2"}))


def test_trl_rewards_of_a_conversation_get_messages_and_others_get_the_prompt(tmp_path) -> None:
    def trl(prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], answer: list[str], **kwargs: Any) -> list[float]:
        assert prompts == [[{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2"}]]
        assert (completion_ids, kwargs) == ([[5, 6]], {})
        ((message,),) = completions
        assert message.keys() == {"role", "content"}
        return [float(message["role"] == "assistant" and message["content"] == answer[0])]

    def plain(prompt: Prompt, completion: str) -> float:
        return float(prompt == CHAT) + float(completion == "4")

    rewards = judge(tmp_path, {"trl": trl, "plain": plain}, ["4", "5"], prompt=CHAT)
    assert rewards == [{"trl": 1.0, "plain": 2.0}, {"trl": 0.0, "plain": 1.0}]


def test_a_trl_reward_that_says_none_is_left_out_and_the_others_count(tmp_path) -> None:
    rewards = {"abstains": lambda completions, **columns: [None if completions[0] == "x" else 0.5],
               "length": lambda prompt, text: len(text), "last": lambda completions: [2.0]}
    assert judge(tmp_path, rewards, ["x", "yy"]) == [{"length": 1.0, "last": 2.0}, {"abstains": 0.5, "length": 2.0, "last": 2.0}]


def test_the_function_that_fails_after_one_that_said_none_is_named(tmp_path) -> None:
    rewards = {"abstains": lambda completions: [None], "second": ends, "third": lambda prompt, completion: 2.0}
    for kind in ("exit", "hang", "raise"):
        bad, good = judge(tmp_path, rewards, [kind, "ok"], timeout_s=0.5)
        assert str(bad).startswith("reward 'second' ")
        assert good == {"second": 1.0, "third": 2.0}


def test_a_column_that_a_prompt_has_not_is_named_with_those_it_has(tmp_path) -> None:
    def trl(completions: list[str], solution: list[str], hint: object = None, *args: object, **kwargs: object) -> list[float]:
        return [1.0]

    with_it, without = (Prompt(text="1+1=", prompt_id="0", columns=columns) for columns in ({"solution": "2"}, {"answer": "2", "level": 1}))
    assert judge(tmp_path, trl, ["2"], prompt=with_it) == [{"f": 1.0}]
    [error] = judge(tmp_path, trl, ["2"], prompt=without)
    assert isinstance(error, RewardError)
    assert str(error) == "reward 'f' asks for solution; the columns of this prompt are answer, level"


@pytest.mark.parametrize("name", ["trainer_state", "log_extra", "log_metric", "environments"])
def test_a_trl_reward_that_cannot_do_without_the_trainer_is_refused(name: str) -> None:
    scope: dict[str, Any] = {}
    exec(f"def needs(completions, {name}): return [1.0]\ndef may(completions, {name}=None): return [1.0]", scope)
    with pytest.raises(ConfigError, match=f"There is no {name} in a reward worker"):
        RewardPool([scope["needs"]])
    RewardPool([scope["may"]])


def test_a_reward_may_use_signal_alarm(tmp_path) -> None:
    def with_alarm(prompt: Prompt, completion: str) -> float:
        def ring(signum: int, frame: object) -> None:
            raise TimeoutError

        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.01 if completion == "slow" else 1000.0)
        try:
            while completion == "slow":
                pass
            return 1.0
        except TimeoutError:
            return 0.5

    assert judge(tmp_path, with_alarm, ["slow", "fast", "slow"], workers=1) == [{"f": 0.5}, {"f": 1.0}, {"f": 0.5}]


def test_an_alarm_that_a_reward_leaves_behind_does_not_ring(tmp_path) -> None:
    def leaves_one(prompt: Prompt, completion: str) -> float:
        left_s, _ = signal.setitimer(signal.ITIMER_REAL, 1000.0)
        return left_s

    assert judge(tmp_path, leaves_one, ["a", "b"], workers=1) == [{"f": 0.0}, {"f": 0.0}]


def ends(prompt: Prompt, completion: str) -> float:
    if completion == "exit":
        os._exit(3)
    if completion == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    while completion == "hang":
        pass
    if completion == "sys.exit":
        sys.exit(4)
    if completion == "raise":
        raise ValueError("x is not a number")
    if completion == "overflow":
        return ends(prompt, completion)
    return 1.0


def test_one_bad_in_eight_gives_seven_results_and_one_failure(tmp_path) -> None:
    for bad in ("exit", "killed", "hang", "raise"):
        results = judge(tmp_path, ends, ["ok"] * 3 + [bad] + ["ok"] * 4, workers=1, timeout_s=0.5)
        assert [isinstance(result, RewardError) for result in results] == [False] * 3 + [True] + [False] * 4
        assert all(result == {"f": 1.0} for result in results if isinstance(result, dict))


def test_how_a_reward_failed_is_told(tmp_path) -> None:
    kinds = ["exit", "killed", "hang", "sys.exit", "raise", "overflow"]
    exited, killed, hung, quit_, raised, overflow = map(str, judge(tmp_path, ends, kinds, timeout_s=0.5))
    assert exited.startswith("reward 'f' ended its worker: exit code 3, peak memory ")
    assert killed.startswith("reward 'f' ended its worker: killed by signal 9 (SIGKILL), probable out of memory, peak memory ")
    assert hung == "reward 'f' ran longer than 0.5 s; its worker was killed"
    assert quit_.startswith("reward 'f' raised SystemExit: 4\n")
    assert re.match(r"reward 'f' raised ValueError: x is not a number\nTraceback .*\n.*in ends\n", raised)  # no line of ours before it
    assert overflow.startswith("reward 'f' raised RecursionError")
    assert len(overflow) < 10_000


def test_the_function_that_failed_is_named_among_several(tmp_path) -> None:
    rewards = {"first": lambda prompt, completion: 1.0, "second": ends, "third": lambda prompt, completion: 2.0}
    for kind in ("exit", "hang", "raise"):
        bad, good = judge(tmp_path, rewards, [kind, "ok"], timeout_s=0.5)
        assert str(bad).startswith("reward 'second' ")
        assert good == {"first": 1.0, "second": 1.0, "third": 2.0}


def test_ten_hung_calls_do_not_exhaust_a_pool_of_two(tmp_path) -> None:
    results = judge(tmp_path, ends, ["hang", "ok", "ok"] * 10, workers=2, timeout_s=0.4)
    assert [type(result) for result in results] == [RewardTimeout, dict, dict] * 10


@pytest.mark.parametrize("workers", [1, 4])
def test_a_reward_that_only_hangs_ends_the_run_after_four_deadlines_however_many_workers(tmp_path, workers: int) -> None:
    results = judge(tmp_path, ends, ["hang"] * 4 * workers, workers=workers, timeout_s=0.2)
    assert [type(result) for result in results[:3 * workers]] == [RewardTimeout] * 3 * workers
    assert type(results[-1]) is RunAborted
    assert str(results[-1]).startswith("no judgement has ended for 4 times env.timeout_s = 0.2 s")


def test_memory_without_end_is_an_error_and_the_worker_goes_on(tmp_path) -> None:
    def greedy(prompt: Prompt, completion: str) -> float:
        held = []
        while completion == "greedy":
            held.append(bytearray(2**24))
        return float(os.getpid())

    first, failed, second = judge(tmp_path, greedy, ["ok", "greedy", "ok"], workers=1, memory_bytes=2**28)
    assert "raised MemoryError" in str(failed)
    assert first == second


@pytest.mark.parametrize("value", [None, math.nan, math.inf, "1", [1.0], np.zeros(2), 1j, 10**400, 1e39])
def test_what_is_not_one_finite_number_is_an_error_that_names_function_and_value(tmp_path, value: object) -> None:
    [error] = judge(tmp_path, lambda prompt, completion: value, ["x"])
    assert isinstance(error, RewardError)
    assert re.match(rf"reward 'f' returned .*\({type(value).__name__}\); it must be one finite number", str(error), re.DOTALL)


@pytest.mark.parametrize(("value", "text"), [
    ([1.0, 2.0], r"returned \[1.0, 2.0\] \(list\) for 1 completion"), ([], r"returned \[\] \(list\)"), (0.5, r"returned 0.5 \(float\)"),
    (None, r"returned None \(NoneType\)"), ([None], r"each reward function returned None"), ([math.nan], r"returned, at index 0, nan"),
    (["1"], r"returned, at index 0, '1'"), (np.zeros(3), r"returned \[0.0, 0.0, 0.0\]"),
])
def test_a_trl_reward_must_return_a_list_of_one_finite_number(tmp_path, value: object, text: str) -> None:
    [error] = judge(tmp_path, lambda completions, **columns: value, ["x"])
    assert isinstance(error, RewardError)
    assert re.search(text, str(error))


def test_tensors_of_one_element_are_numbers(tmp_path) -> None:
    torch = pytest.importorskip("torch")
    assert judge(tmp_path, lambda prompt, completion: torch.tensor([0.5], requires_grad=True), ["x"]) == [{"f": 0.5}]
    [error] = judge(tmp_path, lambda prompt, completion: torch.zeros(2), ["x"])
    assert "(Tensor); it must be one finite number" in str(error)


def test_a_column_that_cannot_travel_is_named(tmp_path) -> None:
    for value in ({1, 2}, 2**70, object()):
        [error] = judge(tmp_path, lambda prompt, completion: 1.0, ["x"], prompt=Prompt(columns={"fine": 1, "odd": value}, prompt_id="p"))
        assert isinstance(error, RewardError)
        assert str(error).startswith("column 'odd' of prompt 'p' cannot reach a reward worker")
    chat = Prompt(messages=({"role": "user", "content": "1", "seen": object()},), prompt_id="p")
    [error] = judge(tmp_path, lambda prompt, completion: 1.0, ["x"], prompt=chat)
    assert str(error).startswith("column 'messages' of prompt 'p' cannot reach a reward worker")


def test_a_step_of_rewards_is_judged_each_once_and_in_place(tmp_path) -> None:
    calls = tmp_path / "calls"

    def counted(prompt: Prompt, completion: str) -> float:
        with calls.open("a") as file:
            file.write(completion + "\n")
        return float(completion)

    assert judge(tmp_path, counted, [str(i) for i in range(512)]) == [{"f": float(i)} for i in range(512)]
    assert sorted(map(int, calls.read_text().split())) == list(range(512))


def test_slow_rewards_spread_over_the_workers(tmp_path) -> None:
    meeting = tmp_path / "meeting"
    os.mkfifo(meeting)

    def meets_another(prompt: Prompt, completion: str) -> float:
        """Returns only when another worker opens the other end at the same time."""
        with meeting.open(completion):
            return 1.0

    assert judge(tmp_path, meets_another, ["r", "w"], workers=2) == [{"f": 1.0}, {"f": 1.0}]


def test_a_reward_that_answered_while_the_controller_was_busy_is_in_time(tmp_path) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        pool = RewardPool([ends], workers=1, timeout_s=500.0)
        pool.start(tmp_path)

        def be_busy() -> None:
            [worker] = pool._workers
            assert select.select([worker.connection._socket], [], [], BOUND_S)[0]
            real = loop.time
            loop.time = lambda: real() + 1000.0

        score = asyncio.create_task(pool.score(PROMPT, "ok", []))
        await asyncio.sleep(0)
        loop.call_soon(be_busy)
        assert await score == {"ends": 1.0}
        del loop.time
        await pool.close()

    asyncio.run(main())


def test_a_cancelled_caller_leaves_the_pool_usable(tmp_path) -> None:
    async def main() -> None:
        pool = RewardPool([ends], workers=1, timeout_s=0.2)
        pool.start(tmp_path)
        callers = [asyncio.create_task(pool.score(PROMPT, kind, [])) for kind in ("hang", "ok", "ok")]
        await asyncio.sleep(0)
        for caller in callers[:2]:
            caller.cancel()
        assert await callers[2] == {"ends": 1.0}
        assert await pool.score(PROMPT, "ok", []) == {"ends": 1.0}
        await pool.close()

    run(main())


def test_closing_fails_what_is_not_judged_and_a_dead_zygote_is_told(tmp_path) -> None:
    async def main() -> None:
        pool = RewardPool([ends], workers=1)
        await pool.close()
        pool = RewardPool([ends], workers=1)
        pool.start(tmp_path)
        callers = [asyncio.create_task(pool.score(PROMPT, "hang", [])) for _ in range(3)]
        await asyncio.sleep(0)
        await pool.close()
        await pool.close()
        for result in await asyncio.gather(*callers, pool.score(PROMPT, "ok", []), return_exceptions=True):
            assert isinstance(result, RewardError)
            assert "closed" in str(result)

        pool = RewardPool([ends], workers=1)
        pool.start(tmp_path)
        callers = [asyncio.create_task(pool.score(PROMPT, "hang", [])) for _ in range(3)]
        await asyncio.sleep(0)
        os.kill(pool._zygote.pid, signal.SIGKILL)
        for result in await asyncio.gather(*callers, return_exceptions=True):
            assert isinstance(result, ChildDied)
        with pytest.raises(ChildDied):
            await pool.score(PROMPT, "ok", [])
        await pool.close()

    run(main())


@pytest.mark.parametrize(("make", "field"), [
    (lambda: RewardPool([ends, ends]), "reward = "),
    (lambda: RewardPool([]), "reward = "),
    (lambda: RewardPool([lambda prompt: 1.0]), "reward.<lambda> = "),
    (lambda: RewardPool({"f": 3}), "reward.f = 3"),
    (lambda: RewardPool([ends], workers=0), "reward.workers = 0"),
    (lambda: RewardPool([ends], timeout_s=0.0), "reward.timeout_s = 0.0"),
    (lambda: RewardPool([ends], memory_bytes=0), "reward.memory_bytes = 0"),
])
def test_a_pool_that_cannot_work_is_refused(make: Callable[[], RewardPool], field: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(field)):
        make()
