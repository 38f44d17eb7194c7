"""The session: budgets, prefixes, versions and masks survive whatever happens between two tokens."""

from __future__ import annotations

import asyncio
import dataclasses
import math

import numpy as np
import pytest

from asyncrl.accounting import Ledger
from asyncrl.clock import run_virtual
from asyncrl.errors import ChildDied, ConfigError, EngineError, NonFiniteError, RewardError
from asyncrl.rollout.engine import Interruption
from asyncrl.rollout.env import Outcome, Session, SingleTurn, Turn
from asyncrl.rollout.fake_engine import FakeEngine, fake_manifest
from asyncrl.rollout.router import Router
from asyncrl.tokenizer import Tokenizer
from asyncrl.types import Prompt, Sampling, Span, Status
from tests.rollout.rollout_fakes import KEY, ScriptedEngine, chunk, requests_of, router_of, session_of, write_tokenizer

INTERRUPTED, LENGTH, STOP = Status.INTERRUPTED, Status.LENGTH, Status.STOP


def scripted(*scripts, prompt=(1, 2), context_tokens=4096, **settings) -> tuple[ScriptedEngine, Session, Turn]:
    """One completion of `prompt` by an engine that answers from `scripts`."""
    async def main():
        engine = ScriptedEngine(*scripts, context_tokens=context_tokens)
        session = session_of(await router_of(engine), **settings)
        return engine, session, await session.generate(prompt)
    return run_virtual(main())


def failing(*scripts, error, **settings) -> tuple[str, Session, Router]:
    """The text of the error the completion ends with."""
    async def main():
        router = await router_of(ScriptedEngine(*scripts))
        session = session_of(router, **settings)
        with pytest.raises(error) as caught:
            await session.generate((1, 2))
        return str(caught.value), session, router
    return run_virtual(main())


def test_the_remaining_budget_is_carried_over_interruptions():
    engine, session, turn = scripted([chunk(11, 12, 13, 14, finish=INTERRUPTED)], [chunk(15, 16, 17, 18, 19, finish=INTERRUPTED)],
                                     [chunk(20, finish=INTERRUPTED)], max_new_tokens=10)
    requests = requests_of(engine)
    assert [request.sampling.max_new_tokens for request in requests] == [10, 6, 1]
    assert [request.tokens.tolist() for request in requests] == [[1, 2], [1, 2, *range(11, 15)], [1, 2, *range(11, 20)]]
    assert turn.tokens.tolist() == list(range(11, 21))
    assert turn.finish is LENGTH
    assert session.num_tokens == 10


def test_an_engine_that_cannot_recompute_gets_prefix_and_rest_after_every_update():
    async def main():
        engine = FakeEngine(in_place_recompute=False)
        router = await router_of(engine)
        session = session_of(router, max_new_tokens=10)
        completion = asyncio.create_task(session.generate((1, 2, 3)))
        for version, pause_s in ((1, 4.5), (2, 5.5)):
            await asyncio.sleep(pause_s)
            await router.update(fake_manifest(version, base=version - 1), Interruption.RECOMPUTE)
        return engine, session, await completion
    engine, session, turn = run_virtual(main())
    assert [request.sampling.max_new_tokens for request in requests_of(engine)] == [10, 6, 1]
    assert (len(turn.tokens), turn.finish) == (10, LENGTH)
    (sequence,) = session.sequences()
    assert sequence.spans == (Span(3, 7, 0), Span(7, 12, 1), Span(12, 13, 2))


@pytest.mark.parametrize(("interruption", "kv_fresh"), [(Interruption.KEEP, False), (Interruption.RECOMPUTE, True)])
def test_spans_are_right_to_the_token_over_updates(interruption, kv_fresh):
    async def main():
        engine = FakeEngine()
        router = await router_of(engine, version=3)
        session = session_of(router, max_new_tokens=6)
        completion = asyncio.create_task(session.generate((1, 2)))
        await asyncio.sleep(2.5)
        await router.update(fake_manifest(4, base=3), interruption)
        await asyncio.sleep(1.0)
        await router.update(fake_manifest(5, base=4), interruption)
        await completion
        return engine, session.sequences()[0]
    engine, sequence = run_virtual(main())
    assert len(requests_of(engine)) == 1
    assert sequence.policy_versions.tolist() == [-1, -1, 3, 3, 4, 5, 5, 5]
    assert sequence.first_version == 3
    assert sequence.spans == (Span(2, 4, 3), Span(4, 5, 4, kv_fresh), Span(5, 8, 5, kv_fresh))
    expected = [-(1.0 + version) - index / 64 for index, version in enumerate([3, 3, 4, 5, 5, 5])]
    assert sequence.rollout_logprobs[2:].tolist() == expected


def test_prompt_generated_and_remaining_never_exceed_the_context():
    engine, _, turn = scripted([chunk(5, 6, finish=INTERRUPTED)], [chunk(7, 8, 9, finish=LENGTH)], prompt=tuple(range(95)),
                               context_tokens=100, max_new_tokens=20)
    requests = requests_of(engine)
    assert [request.sampling.max_new_tokens for request in requests] == [5, 3]
    assert all(len(request.tokens) + request.sampling.max_new_tokens == 100 for request in requests)
    assert (len(turn.tokens), turn.finish) == (5, LENGTH)


@pytest.mark.parametrize("length", [100, 101])
def test_a_prompt_without_room_for_one_token_sends_no_request(length):
    engine, session, turn = scripted(prompt=tuple(range(length)), context_tokens=100)
    assert requests_of(engine) == []
    assert (turn.finish, len(turn.tokens), session.num_tokens) == (Status.PROMPT_TOO_LONG, 0, 0)


def test_partial_tokens_are_kept_when_the_interrupting_chunk_is_empty():
    engine, session, turn = scripted([chunk(8), chunk(9), chunk(finish=INTERRUPTED)], [chunk(1, finish=STOP)])
    assert requests_of(engine)[1].tokens.tolist() == [1, 2, 8, 9]
    assert turn.tokens.tolist() == [8, 9, 1]
    (sequence,) = session.sequences()
    assert sequence.rollout_logprobs.tolist() == [0, 0, -0.5, -0.5, -0.5]
    assert len(sequence.tokens) == len(sequence.loss_mask) == len(sequence.policy_versions) == len(sequence.rollout_logprobs) == 5


@pytest.mark.parametrize(("logprobs", "got"), [(None, "None"), ([-0.5], "1")])
def test_tokens_without_a_logprob_each_are_an_error_that_names_the_request(logprobs, got):
    text, session, _ = failing([chunk(8, 9, logprobs=logprobs, finish=STOP)], error=EngineError)
    assert "request 4.2.0.0: 2 sampled tokens came with" in text
    assert f"with {got} logprobs" in text
    assert session.num_tokens == 0


@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf])
def test_a_broken_logprob_ends_the_rollout_and_is_never_replaced(bad):
    ledger = Ledger()
    text, session, _ = failing([chunk(7), chunk(8, 9, logprobs=[-0.5, bad], finish=STOP)], error=NonFiniteError, ledger=ledger)
    assert "request 4.2.0.0" in text
    assert session.sequences()[0].tokens.tolist() == [1, 2, 7]
    assert ledger.open_rollouts == {KEY: 1}


def test_an_engine_that_reports_a_broken_row_ends_the_turn_with_that_status():
    _, session, turn = scripted([chunk(7), chunk(8, logprobs=[math.nan], finish=Status.NONFINITE_LOGPROB)])
    assert turn.finish is Status.NONFINITE_LOGPROB
    assert session.sequences()[0].tokens.tolist() == [1, 2, 7]


def test_an_engine_that_writes_more_than_the_budget_is_an_error_and_its_request_is_closed_at_once():
    text, session, router = failing([chunk(7, 8), chunk(9, 10)], error=EngineError, max_new_tokens=3)
    assert "engine wrote 4 tokens, budget 3" in text
    assert session.num_tokens == 2
    assert router.running == 0


def test_a_stream_that_ends_without_a_finish_is_an_error():
    text, _, _ = failing([chunk(7)], error=EngineError)
    assert "ended without a finish reason" in text


def test_turns_that_append_make_one_sequence_and_never_retokenise():
    async def main():
        he, llo = 5, 6  # a tokenizer would merge them into one token, 7
        session = session_of(await router_of(ScriptedEngine([chunk(he, llo, finish=STOP)], [chunk(9, finish=STOP)])))
        first = await session.generate((1, 2))
        await session.generate((1, 2, *first.tokens.tolist(), 3, 4))
        return session
    session = run_virtual(main())
    (sequence,) = session.sequences()
    assert sequence.tokens.tolist() == [1, 2, 5, 6, 3, 4, 9]
    assert sequence.loss_mask.tolist() == [False, False, True, True, False, False, True]
    assert sequence.turn_ids.tolist() == [-1, -1, 0, 0, 1, 1, 1]
    assert sequence.rollout_logprobs.tolist() == [0, 0, -0.5, -0.5, 0, 0, -0.5]
    assert session.forks == 0


def test_rewritten_history_forks_and_each_sampled_token_is_in_exactly_one_sequence():
    async def main():
        ledger = Ledger()
        session = session_of(await router_of(ScriptedEngine([chunk(5, 6, 7, finish=STOP)], [chunk(8, 9, finish=STOP)])), ledger=ledger)
        await session.generate((1, 2))
        await session.generate((1, 2, 7, 3))  # the template dropped what was thought: 5, 6
        return session, ledger
    session, ledger = run_virtual(main())
    first, second = session.sequences()
    assert session.forks == 1
    assert first.tokens[first.loss_mask].tolist() == [5, 6, 7]
    assert second.tokens.tolist() == [1, 2, 7, 3, 8, 9]
    assert second.tokens[second.loss_mask].tolist() == [8, 9]
    assert ledger.open_rollouts == {KEY: 5}
    assert session.num_tokens == first.num_sampled_tokens + second.num_sampled_tokens == 5


def test_a_history_cut_short_is_a_rewrite_too():
    async def main():
        session = session_of(await router_of(ScriptedEngine([chunk(5, 6, finish=STOP)], [chunk(8, finish=STOP)])))
        await session.generate((1, 2))
        await session.generate((1, 2, 5))
        return session
    assert [sequence.loss_mask.tolist() for sequence in run_virtual(main()).sequences()] == [[0, 0, 1, 1], [0, 0, 0, 1]]


def test_an_engine_that_dies_hands_its_request_with_prefix_to_another():
    async def main():
        engines = FakeEngine(name="a"), FakeEngine(name="b")
        router = await router_of(*engines)
        session = session_of(router, max_new_tokens=5)
        completion = asyncio.create_task(session.generate((1, 2)))
        await asyncio.sleep(2.5)
        await router.update(fake_manifest(1, base=0), Interruption.KEEP)  # delivers two tokens
        await asyncio.sleep(1.0)
        engines[0].die()
        turn = await completion
        return engines, session, turn, router
    (_, b), session, turn, router = run_virtual(main())
    (request,) = requests_of(b)
    assert (len(request.tokens), request.sampling.max_new_tokens) == (4, 3)
    assert (len(turn.tokens), turn.finish) == (5, LENGTH)
    assert session.sequences()[0].policy_versions.tolist() == [-1, -1, 0, 0, 1, 1, 1]
    assert router.serving == ("b",)


def test_the_death_of_the_last_engine_is_raised():
    async def main():
        engine = FakeEngine()
        session = session_of(await router_of(engine))
        completion = asyncio.create_task(session.generate((1, 2)))
        await asyncio.sleep(1.5)
        engine.die("killed by signal 9, peak memory 312 MB")
        with pytest.raises(ChildDied, match="signal 9, peak memory 312 MB"):
            await completion
    run_virtual(main())


def test_the_ledger_hears_of_every_token_as_it_comes():
    async def main():
        engine, ledger = FakeEngine(), Ledger()
        router = await router_of(engine)
        session = session_of(router, ledger=ledger, max_new_tokens=5)
        seen = [dict(ledger.open_rollouts)]
        completion = asyncio.create_task(session.generate((1,)))
        for version in (1, 2):
            await asyncio.sleep(1.5)
            await router.update(fake_manifest(version, base=version - 1), Interruption.KEEP)
            await asyncio.sleep(0)
            seen.append(dict(ledger.open_rollouts))
            assert ledger.open_rollouts == {KEY: session.num_tokens}
        await completion
        return [*seen, dict(ledger.open_rollouts)]
    assert run_virtual(main()) == [{KEY: 0}, {KEY: 1}, {KEY: 3}, {KEY: 5}]


def test_cancelling_a_session_cancels_its_request():
    async def main():
        engine = FakeEngine()
        router = await router_of(engine)
        completion = asyncio.create_task(session_of(router).generate((1, 2)))
        await asyncio.sleep(1.5)
        completion.cancel()
        await asyncio.gather(completion, return_exceptions=True)
        assert router.running == engine.running_requests == 0
        assert ("cancel", "4.2.0.0") in engine.calls
    run_virtual(main())


def test_every_sampling_field_is_sent_explicitly():
    engine, _, _ = scripted([chunk(5, finish=STOP)], temperature=0.6)
    assert dataclasses.asdict(requests_of(engine)[0].sampling) == {
        "temperature": 0.6, "max_new_tokens": 10, "top_p": 1.0, "top_k": None, "min_p": 0.0, "min_new_tokens": 0,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "stop": ()}


def test_each_request_has_a_seed_of_its_own_and_the_same_one_in_every_run():
    script = [chunk(5, finish=INTERRUPTED)], [chunk(6, finish=STOP)]
    seeds = [[request.seed for request in requests_of(scripted(*script)[0])] for _ in range(2)]
    assert seeds[0] == seeds[1]
    assert seeds[0][0] != seeds[0][1]


@pytest.mark.parametrize("changed", [{"temperature": 0.5}, {"top_p": 0.9}, {"top_k": 20}, {"repetition_penalty": 1.1}])
def test_an_environment_may_not_sample_from_another_distribution(changed):
    async def main():
        session = session_of(await router_of(ScriptedEngine()))
        with pytest.raises(ConfigError, match=r"Session\.generate"):
            await session.generate((1, 2), Sampling(**changed))
    run_virtual(main())


def test_an_environment_may_choose_the_budget_of_a_turn():
    async def main():
        engine = ScriptedEngine([chunk(5, finish=STOP)])
        session = session_of(await router_of(engine), max_new_tokens=10)
        await session.generate((1, 2), Sampling(max_new_tokens=3))
        return requests_of(engine)[0].sampling.max_new_tokens
    assert run_virtual(main()) == 3


@pytest.mark.parametrize("rewards", [{}, {"r": math.nan}, {"r": math.inf}, {"r": -1e39}, {"r": None}, {"r": "1"}, {"a": 1.0, "r": [1.0]}])
def test_an_outcome_without_finite_rewards_is_an_error_not_a_zero(rewards):
    with pytest.raises(RewardError):
        Outcome(STOP, rewards)


def test_an_outcome_takes_numbers_of_any_kind_and_an_error_needs_none():
    assert Outcome(LENGTH, {"a": np.float32(0.5), "b": 1}).rewards == {"a": 0.5, "b": 1}
    assert Outcome(Status.REWARD_ERROR).rewards == {}


def test_a_single_turn_is_judged_on_its_text(tmp_path):
    async def main():
        engine = ScriptedEngine([chunk(4, 5, 6, finish=LENGTH)], [chunk(6, finish=Status.NONFINITE_LOGPROB)])
        router = await router_of(engine)
        env = SingleTurn(lambda prompt, completion: float(completion) + prompt.columns["plus"], timeout_s=20.0)
        env.start(tmp_path / "logs", Tokenizer(write_tokenizer(tmp_path / "model")))
        try:
            prompt = Prompt(tokens=(7,), columns={"plus": 1000})
            return await env.run(prompt, session_of(router)), await env.run(prompt, session_of(router))
        finally:
            await env.close()
    judged, broken = asyncio.run(main())
    assert judged.status is LENGTH
    assert sum(judged.rewards.values()) == 1123.0
    assert judged.reward_s > 0
    assert broken == Outcome(Status.NONFINITE_LOGPROB)
