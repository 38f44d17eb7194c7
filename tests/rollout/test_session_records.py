"""Records in a session: over turns, forks, and engines that end on the way."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest

from asyncrl.accounting import Ledger
from asyncrl.errors import ChildDied, EngineError
from asyncrl.records import NO_EXPERT, KeptSets, TokenRecords, Wanted
from asyncrl.rollout.engine import Chunk
from asyncrl.rollout.env import Session
from asyncrl.types import Sampling, Status
from tests.rollout.rollout_fakes import KEY, ScriptedEngine, chunk, requests_of, router_of

WANTED = Wanted(kept_sets=True, routed_experts=True)
TRUNCATED = Sampling(top_k=3, max_new_tokens=6)


def recorded(*tokens: int, passed: int, mark: int, finish: Status | None = None) -> Chunk:
    """Each token was sampled among itself and the next id; `passed` inputs went to experts `mark`."""
    kept = KeptSets.of([np.array([token, token + 1], np.int32) for token in tokens])
    return dataclasses.replace(chunk(*tokens, finish=finish), records=TokenRecords(kept, np.full((passed, 1, 1), mark, np.int16)))


def session_on(router: object, *, sampling: Sampling = TRUNCATED) -> Session:
    return Session(router, key=KEY, seed=0, sampling=sampling, ledger=Ledger(), wanted=WANTED)  # type: ignore[arg-type]


def rows(kept: KeptSets) -> list[int]:
    return kept.counts.tolist()


def test_a_fork_leaves_each_sequence_its_own_records() -> None:
    async def main() -> None:
        engine = ScriptedEngine([recorded(5, 6, passed=3, mark=1, finish=Status.STOP)], [recorded(8, passed=4, mark=2, finish=Status.STOP)])
        session = session_on(await router_of(engine))
        await session.generate([1, 2])
        await session.generate([1, 2, 5, 9])
        first, second = session.sequences()
        assert (first.tokens.tolist(), rows(first.records.kept)) == ([1, 2, 5, 6], [0, 0, 2, 2])
        assert (second.tokens.tolist(), rows(second.records.kept)) == ([1, 2, 5, 9, 8], [0, 0, 0, 0, 2])
        assert first.records.experts[:, 0, 0].tolist() == [1, 1, 1, NO_EXPERT]
        assert second.records.experts[:, 0, 0].tolist() == [2, 2, 2, 2, NO_EXPERT]
        assert all(request.wanted == WANTED for request in requests_of(engine))

    asyncio.run(main())


def test_a_later_turn_adds_the_records_of_what_the_environment_said() -> None:
    async def main() -> None:
        session = session_on(await router_of(ScriptedEngine([recorded(5, 6, passed=3, mark=1, finish=Status.STOP)],
                                                            [recorded(8, passed=6, mark=2, finish=Status.STOP)])))
        await session.generate([1, 2])
        await session.generate([1, 2, 5, 6, 3, 3])
        one, = session.sequences()
        assert rows(one.records.kept) == [0, 0, 2, 2, 0, 0, 2]
        assert one.records.experts[:, 0, 0].tolist() == [1, 1, 1, 2, 2, 2, NO_EXPERT]

    asyncio.run(main())


def test_what_was_written_before_an_interruption_keeps_its_records() -> None:
    async def main() -> None:
        session = session_on(await router_of(ScriptedEngine([recorded(5, 6, passed=3, mark=1, finish=Status.INTERRUPTED)],
                                                            [recorded(7, 8, passed=5, mark=2, finish=Status.STOP)])))
        await session.generate([1, 2])
        one, = session.sequences()
        assert rows(one.records.kept) == [0, 0, 2, 2, 2, 2]
        assert one.records.experts[:, 0, 0].tolist() == [1, 1, 1, 2, 2, NO_EXPERT]

    asyncio.run(main())


def test_a_request_that_moves_to_another_engine_goes_on_with_its_records() -> None:
    class Dying(ScriptedEngine):
        async def generate(self, request):
            yield recorded(5, passed=2, mark=1)
            raise ChildDied("killed")

    async def main() -> None:
        router = await router_of(Dying(name="a"), ScriptedEngine([recorded(6, passed=3, mark=2, finish=Status.STOP)], name="b"))
        session = session_on(router)
        await session.generate([1, 2])
        one, = session.sequences()
        assert (one.tokens.tolist(), rows(one.records.kept)) == ([1, 2, 5, 6], [0, 0, 2, 2])
        assert one.records.experts[:, 0, 0].tolist() == [1, 1, 2, NO_EXPERT]

    asyncio.run(main())


def test_sets_are_wanted_where_the_sampling_truncates() -> None:
    async def main() -> None:
        engine = ScriptedEngine([dataclasses.replace(recorded(5, passed=2, mark=1, finish=Status.STOP),
                                                     records=TokenRecords(experts=np.zeros((2, 1, 1), np.int16)))])
        session = session_on(await router_of(engine), sampling=Sampling(max_new_tokens=6))
        await session.generate([1, 2])
        assert requests_of(engine)[0].wanted == Wanted(routed_experts=True)
        assert session.sequences()[0].records.kept is None

    asyncio.run(main())


@pytest.mark.parametrize("records", [TokenRecords(), TokenRecords(KeptSets.of([np.array([5], np.int32)])),
                                     TokenRecords(experts=np.zeros((2, 1, 1), np.int16))])
def test_a_chunk_without_what_was_wanted_is_an_error_of_the_engine(records: TokenRecords) -> None:
    async def main() -> None:
        session = session_on(await router_of(ScriptedEngine([dataclasses.replace(chunk(5, finish=Status.STOP), records=records)])))
        with pytest.raises(EngineError, match="of its tokens, wanted"):
            await session.generate([1, 2])
        assert not session.sequences()[0].num_sampled_tokens

    asyncio.run(main())
