"""The worker: whatever fails becomes a status with its text, and every token stays on the ledger."""

from __future__ import annotations

import asyncio
import math

import pytest

from asyncrl.accounting import Count, Ledger
from asyncrl.clock import run_virtual
from asyncrl.errors import ChildDied, ConfigError, EngineError, NonFiniteError, RewardError, RewardTimeout, RunAborted, ShapeError
from asyncrl.rollout.engine import Interruption
from asyncrl.rollout.env import Outcome, SingleTurn
from asyncrl.rollout.evaluate import roll_out_all
from asyncrl.rollout.fake_engine import FakeEngine, fake_manifest
from asyncrl.rollout.worker import Requests, RolloutWorker
from asyncrl.tokenizer import Tokenizer
from asyncrl.types import Prompt, Rollout, Sampling, Status
from tests.rollout.rollout_fakes import ScriptedEngine, chunk, one_turn, requests_of, router_of, worker_of, write_tokenizer

PROMPT = Prompt(text="1+", tokens=(3, 4), source="sums", prompt_id="sums/9")


def run_one(function=one_turn, *, engine=None, **settings) -> tuple[Rollout, Ledger]:
    """One rollout, and the ledger its buffer would close."""
    async def main():
        ledger = Ledger()
        worker = worker_of(await router_of(engine or FakeEngine()), function, ledger=ledger, **settings)
        rollout = await worker.run(PROMPT, group_id=5, index=1)
        assert worker.in_flight() == Count(0, 0)
        return rollout, ledger
    return run_virtual(main())


def raising(error: Exception, *, after_tokens: bool = True):
    """An environment that fails, before or after it has generated."""
    async def run(prompt, session):
        if after_tokens:
            await session.generate(prompt.tokens)
        raise error
    return run


def test_a_rollout_says_where_it_comes_from_and_what_it_earned():
    rollout, ledger = run_one(max_new_tokens=4)
    assert (rollout.prompt_id, rollout.group_id, rollout.index, rollout.source) == ("sums/9", 5, 1, "sums")
    assert (rollout.status, rollout.reward, rollout.num_tokens, rollout.error) == (Status.LENGTH, 1.0, 4, "")
    assert rollout.sequences[0].loss_mask.sum() == 4
    assert rollout.sampling.max_new_tokens == 4
    ledger.completed(rollout)
    assert ledger.open_rollouts == {}


@pytest.mark.parametrize(("error", "status"), [
    (ValueError("the tool is away"), Status.ENV_ERROR), (RewardError("division by zero"), Status.REWARD_ERROR),
    (RewardTimeout("over 10 s"), Status.REWARD_TIMEOUT), (EngineError("400 bad request"), Status.ENGINE_ERROR),
    (ShapeError("2 tokens, 1 logprob"), Status.ENGINE_ERROR), (NonFiniteError("logprob nan"), Status.NONFINITE_LOGPROB),
    (TimeoutError("the page"), Status.ENV_ERROR)])
def test_a_failure_is_a_status_with_its_text_and_no_reward(error, status):
    rollout, ledger = run_one(raising(error))
    assert rollout.status is status
    assert str(error) in rollout.error
    assert "in run" in rollout.error  # the place in the environment
    assert rollout.rewards == {}
    assert math.isnan(rollout.reward)
    assert rollout.num_tokens == 4
    assert not rollout.sequences[0].loss_mask.any()
    ledger.completed(rollout)


def test_the_places_of_a_reward_error_are_the_users_alone():
    async def run(prompt, session):
        await session.generate(prompt.tokens)
        Outcome(Status.LENGTH, {"f": math.nan})

    rollout, _ = run_one(run)
    assert rollout.status is Status.REWARD_ERROR
    assert "in run" in rollout.error
    assert "rollout/env.py" not in rollout.error


def test_an_error_that_is_long_or_cannot_be_shown_is_a_failure_like_any_other():
    class Unshown(Exception):
        def __str__(self):
            raise RuntimeError("not I")

    assert run_one(raising(Unshown()))[0].error.startswith("Unshown: <RuntimeError when shown>\n")
    assert len(run_one(raising(ValueError("x" * 10**6)))[0].error) < 10_000


def test_a_rollout_that_fails_before_its_first_token_closes_too():
    rollout, ledger = run_one(raising(ValueError("no"), after_tokens=False))
    assert (rollout.sequences, rollout.num_tokens, rollout.first_version) == ((), 0, -1)
    ledger.completed(rollout)
    assert ledger.account(buffered=(0, 1), in_flight=(0, 0)).is_closed


@pytest.mark.parametrize("answer", [None, 1.0, Outcome(Status.INTERRUPTED)])
def test_an_environment_must_return_the_outcome_of_a_finished_rollout(answer):
    async def run(prompt, session):
        return answer
    rollout, _ = run_one(run)
    assert rollout.status is Status.ENV_ERROR
    assert f"Env.run returned {answer!r}" in rollout.error


def test_an_outcome_without_reward_is_a_reward_error_not_a_zero():
    async def run(prompt, session):
        return Outcome(Status.STOP)
    rollout, _ = run_one(run)
    assert (rollout.status, rollout.rewards) == (Status.REWARD_ERROR, {})


def test_nan_logprobs_reject_the_rollout_and_many_of_them_end_the_run():
    broken = [chunk(7, 8, 9, logprobs=[-0.5, math.nan, -0.7], finish=Status.STOP)]
    rollout, ledger = run_one(engine=ScriptedEngine(broken))
    assert rollout.status is Status.NONFINITE_LOGPROB
    assert rollout.num_tokens == 0
    ledger.completed(rollout)

    async def main():
        worker = worker_of(await router_of(ScriptedEngine(broken, broken, broken)), error_budget=2 / 64)
        for _ in range(2):
            assert (await worker.run(PROMPT, group_id=0, index=0)).status is Status.NONFINITE_LOGPROB
        with pytest.raises(RunAborted, match=r"3 of the last 3 rollouts failed.*: 3 nonfinite_logprob\. .*The newest, nonfinite_logprob: "):
            await worker.run(PROMPT, group_id=0, index=0)
    run_virtual(main())


def test_one_failure_of_eight_leaves_seven_results_and_one_record_with_its_text():
    async def third_fails(prompt, session):
        if prompt.prompt_id == "3":
            raise ValueError("x marks the spot")
        return await one_turn(prompt, session)

    async def main():
        worker = worker_of(await router_of(FakeEngine()), third_fails)
        return await roll_out_all(worker, [Prompt(tokens=(3,), prompt_id=str(number)) for number in range(8)], group_id=-1,
                                  stall_timeout_s=1e6)
    rollouts = run_virtual(main())
    failed = [rollout for rollout in rollouts if rollout.status.is_error]
    assert len(rollouts) == 8
    assert [rollout.prompt_id for rollout in failed] == ["3"]
    assert "ValueError: x marks the spot" in failed[0].error
    assert [rollout.reward for rollout in rollouts if rollout not in failed] == [1.0] * 7


def test_failures_over_the_budget_end_the_run_with_the_text_of_the_newest():
    async def main():
        count = 0

        async def run(prompt, session):
            nonlocal count
            count += 1
            raise RewardError(f"failure number {count}")
        ledger = Ledger()
        worker = worker_of(await router_of(FakeEngine()), run, ledger=ledger, error_budget=2 / 64)
        for index in range(2):
            ledger.completed(await worker.run(PROMPT, group_id=0, index=index))
        with pytest.raises(RunAborted, match=r"3 of the last 3 rollouts failed[\s\S]*3 reward_error[\s\S]*failure number 3"):
            await worker.run(PROMPT, group_id=0, index=2)
        assert ledger.open_rollouts == {}
        assert ledger.check(buffered=(0, 2), in_flight=worker.in_flight()).dropped == {"run_failed": Count(0, 1)}
    run_virtual(main())


def test_what_is_in_flight_is_what_the_ledger_heard():
    async def main():
        ledger = Ledger()
        router = await router_of(FakeEngine())
        worker = worker_of(router, ledger=ledger, max_new_tokens=4)
        tasks = [asyncio.create_task(worker.run(PROMPT, group_id=0, index=index)) for index in range(3)]
        await asyncio.sleep(0)
        assert worker.in_flight() == Count(0, 3)
        for version, tokens in ((1, 3), (2, 9)):
            await asyncio.sleep(1.5)
            await router.update(fake_manifest(version, base=version - 1), Interruption.KEEP)  # a pause delivers what is written
            await asyncio.sleep(0)
            assert worker.in_flight() == Count(tokens, 3)
            ledger.check(buffered=(0, 0), in_flight=worker.in_flight())
        for rollout in await asyncio.gather(*tasks):
            ledger.completed(rollout)
        ledger.check(buffered=(12, 3), in_flight=worker.in_flight())
    run_virtual(main())


def test_cancelled_rollouts_are_dropped_as_the_end_of_the_run():
    async def main():
        ledger = Ledger()
        router = await router_of(FakeEngine())
        worker = worker_of(router, ledger=ledger, max_new_tokens=9)
        task = asyncio.create_task(worker.run(PROMPT, group_id=0, index=0))
        await asyncio.sleep(2.5)
        await router.update(fake_manifest(1, base=0), Interruption.KEEP)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        account = ledger.check(buffered=(0, 0), in_flight=worker.in_flight())
        assert account.dropped == {"end_of_run": Count(2, 1)}
    run_virtual(main())


@pytest.mark.parametrize("error", [ChildDied("engine a is gone"), RunAborted("no engine serves"),
                                   ConfigError("env", value=1, allowed="2", remedy="Set 2.")])
def test_what_no_retry_mends_ends_the_run_and_the_ledger_closes(error):
    async def main():
        ledger = Ledger()
        worker = worker_of(await router_of(FakeEngine()), raising(error), ledger=ledger, max_new_tokens=2)
        with pytest.raises(type(error)):
            await worker.run(PROMPT, group_id=0, index=0)
        assert ledger.check(buffered=(0, 0), in_flight=worker.in_flight()).dropped == {"run_failed": Count(2, 1)}
    run_virtual(main())


def test_time_is_split_between_generation_and_reward():
    async def run(prompt, session):
        turn = await session.generate(prompt.tokens)
        await asyncio.sleep(6.0)
        return Outcome(turn.finish, {"total": 1.0}, reward_s=6.0)
    rollout, _ = run_one(run, max_new_tokens=4)
    assert (rollout.generate_s, rollout.reward_s) == (4.0, 6.0)


def test_the_seed_of_a_rollout_depends_on_its_place_alone():
    async def main():
        engine = FakeEngine()
        worker = worker_of(await router_of(engine))
        for group_id, index in ((0, 0), (0, 1), (1, 0), (0, 0)):
            await worker.run(PROMPT, group_id=group_id, index=index)
        return [request.seed for request in requests_of(engine)]
    seeds = run_virtual(main())
    assert seeds[0] == seeds[3]
    assert len(set(seeds)) == 3


def test_a_cancellation_inside_the_environment_is_its_failure_and_no_rollout_vanishes():
    async def run(prompt, session):
        await session.generate(prompt.tokens)
        tool = asyncio.create_task(asyncio.sleep(10))
        await asyncio.sleep(0)
        tool.cancel()
        await tool
    rollout, ledger = run_one(run)
    assert rollout.status is Status.ENV_ERROR
    assert "CancelledError" in rollout.error
    ledger.completed(rollout)
    assert ledger.open_rollouts == {}


def test_what_an_engine_refuses_is_asked_once_and_its_words_are_kept():
    def refuses(request, index, version):
        raise EngineError("400: prompt holds an unknown token")
    engine = FakeEngine(refuses)
    rollout, _ = run_one(engine=engine)
    assert rollout.status is Status.ENGINE_ERROR
    assert "400: prompt holds an unknown token" in rollout.error
    assert len(requests_of(engine)) == 1


@pytest.mark.parametrize(("deterministic", "waves"), [(True, ["5.0.0.0", "5.1.0.0"]), (False, [None, None])])
def test_in_a_deterministic_run_a_request_that_may_come_at_any_time_is_sampled_alone(deterministic, waves):
    async def main():
        engine = FakeEngine()
        worker = worker_of(await router_of(engine), deterministic=deterministic)
        for index in range(2):
            await worker.run(PROMPT, group_id=5, index=index)
        return [request.wave for request in requests_of(engine)]
    assert run_virtual(main()) == waves


def test_in_a_deterministic_run_the_requests_of_a_group_that_come_at_once_are_sampled_together(tmp_path):
    async def main():
        engine, env = FakeEngine(token_s=0.0), SingleTurn({"one": lambda prompt, completion: 1.0})
        env.start(tmp_path, Tokenizer(write_tokenizer(tmp_path)))
        try:
            worker = RolloutWorker(await router_of(engine), env, sampling=Sampling(), ledger=Ledger(), seed=0,
                                   requests=Requests(deterministic=True))
            for group_id, index in ((5, 0), (5, 1), (6, 0)):
                await worker.run(PROMPT, group_id=group_id, index=index)
            return [request.wave for request in requests_of(engine)]
        finally:
            await env.close()
    assert asyncio.run(asyncio.wait_for(main(), 60)) == ["5", "5", "6"]
