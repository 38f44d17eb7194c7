"""The engine in the calling process: the contract, and the same bits every time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from asyncrl.errors import ChildDied, EngineError, WeightSyncError, WrongBase
from asyncrl.rollout import inline_wave
from asyncrl.rollout.engine import GenerationRequest, Interruption
from asyncrl.rollout.inline_engine import InlineEngine
from asyncrl.rollout.inline_wave import sample
from asyncrl.rollout.truncation import Truncation, limits_of, renormalised
from asyncrl.types import NOT_SAMPLED, Sampling, Status
from tests.rollout import engine_contract, records_contract, sleep_contract, start_contract
from tests.rollout.engine_contract import Rig
from tests.rollout.model_rig import EOS_TOKENS, PublishedModel, prompts, publish_model

LONG_SEED = 0
"""Of a stream that writes at least nine tokens after the second prompt before an end token, under each version used."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PublishedModel:
    return publish_model(tmp_path_factory.mktemp("inline"))


@pytest.fixture
def rig(model: PublishedModel) -> Iterator[Rig]:
    with asyncio.Runner() as runner:
        made = _rig(model, runner)
        yield made
        runner.run(made.engine.close())


@pytest.mark.parametrize("rule", [*engine_contract.RULES, *sleep_contract.RULES, *engine_contract.MODEL_RULES],
                         ids=lambda rule: rule.__name__)
def test_contract(rig: Rig, rule) -> None:
    rig.run(rule(rig))


@pytest.mark.parametrize("rule", records_contract.KEPT_RULES, ids=lambda rule: rule.__name__)
def test_contract_of_kept_sets(rig: Rig, rule) -> None:
    rig.run(rule(rig))


@pytest.mark.parametrize("kind", [Interruption.KEEP, Interruption.RECOMPUTE])
def test_kept_sets_go_on_over_an_interruption(rig: Rig, kind: Interruption) -> None:
    rig.run(records_contract.kept_sets_go_on_over_an_interruption(rig, kind))


def test_nothing_is_sampled_before_an_anchor(rig: Rig) -> None:
    rig.run(start_contract.an_engine_without_a_version_does_not_sample(rig.engine))


def test_started_again_it_is_a_new_engine(model: PublishedModel, rig: Rig) -> None:
    rig.run(start_contract.started_again_it_is_a_new_engine(rig, model.paths))


def test_the_same_requests_give_the_same_bits_whatever_ran_before(model: PublishedModel) -> None:
    async def main(rig: Rig, *, warm: bool) -> list[tuple[bytes, bytes]]:
        await rig.begin()
        if warm:
            await rig.write(rig.prompts[3], Sampling(max_new_tokens=9), seed=123)
        written = await rig.write_all([Sampling(max_new_tokens=20)] * len(rig.prompts))
        return [(one.tokens.tobytes(), one.logprobs.tobytes()) for one in written]

    results = []
    for warm in (False, True):
        with asyncio.Runner() as runner:
            rig = _rig(model, runner)
            results.append(rig.run(main(rig, warm=warm)))
            rig.run(rig.engine.close())
    assert results[0] == results[1]


def test_a_wave_that_is_named_has_nobody_else_in_it(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    waves: list[list[str]] = []

    class Watched(inline_wave.Wave):
        def __init__(self, model: object, rows: list[inline_wave.Row], **settings: object) -> None:
            waves.append([row.request.request_id for row in rows])
            super().__init__(model, rows, **settings)  # type: ignore[arg-type]

    async def one(number: int, wave: str | None) -> bytes:
        request = GenerationRequest(f"{wave}{number}", rig.prompts[number], Sampling(max_new_tokens=6), seed=number, wave=wave)
        chunks = [chunk async for chunk in rig.engine.generate(request)]
        return b"".join(chunk.tokens.tobytes() + chunk.logprobs.tobytes() for chunk in chunks)

    async def main() -> None:
        await rig.begin()
        alone = await asyncio.gather(one(0, "a"), one(2, "a"))
        waves.clear()
        among_others = await asyncio.gather(one(0, "a"), one(1, "b"), one(0, None), one(2, "a"), one(3, None), one(2, "b"))
        assert waves == [["a0", "a2"], ["b1", "b2"], ["None0", "None3"]]
        assert [among_others[0], among_others[3]] == alone

    monkeypatch.setattr(inline_wave, "Wave", Watched)
    rig.run(main())


def test_deltas_give_the_bits_of_an_engine_that_started_with_the_newest_version(model: PublishedModel) -> None:
    async def main(rig: Rig, path: tuple[tuple[int, int | None], ...]) -> list[bytes]:
        for version, base in path:
            await rig.update(version, base, Interruption.DRAIN)
        written = await rig.write_all([Sampling(max_new_tokens=20)] * len(rig.prompts))
        return [one.tokens.tobytes() + one.logprobs.tobytes() for one in written]

    results = []
    for path in (((0, None), (1, 0), (2, 1)), ((2, None),)):
        with asyncio.Runner() as runner:
            rig = _rig(model, runner)
            results.append(rig.run(main(rig, path)))
            rig.run(rig.engine.close())
    assert results[0] == results[1]


@pytest.mark.parametrize(("kind", "fresh"), [(Interruption.KEEP, False), (Interruption.RECOMPUTE, True)])
def test_an_update_after_token_n_starts_a_span_at_n(rig: Rig, kind: Interruption, fresh: bool) -> None:
    async def main() -> None:
        await rig.begin()
        task = asyncio.create_task(rig.write(rig.prompts[1], Sampling(max_new_tokens=9), seed=LONG_SEED))
        await _until_sampled(rig.engine, 4)
        await rig.update(1, 0, kind)
        await _until_sampled(rig.engine, 7)
        await rig.update(2, 1, kind)
        written = await task
        rig.check(written)
        assert written.spans == [(4, 0, True), (3, 1, fresh), (2, 2, fresh)]

    rig.run(main())


def test_requests_beyond_one_wave_wait_for_the_next(model: PublishedModel) -> None:
    async def main(rig: Rig) -> None:
        await rig.begin()
        tasks = [asyncio.create_task(rig.write(prompt, Sampling(max_new_tokens=5), seed=index)) for index, prompt in enumerate(rig.prompts)]
        await _until_sampled(rig.engine, 1)
        await rig.update(1, 0, Interruption.DRAIN)
        versions = [(await task).spans[0][1] for task in tasks]
        assert versions == [0] * 4 + [1] * (len(tasks) - 4)

    with asyncio.Runner() as runner:
        rig = _rig(model, runner, max_batch_requests=4)
        rig.run(main(rig))
        rig.run(rig.engine.close())


def test_a_failed_write_leaves_an_engine_that_serves_nothing_until_an_anchor(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise WeightSyncError("memory reads back differently")

    async def main() -> None:
        await rig.begin()
        await rig.engine.pause(Interruption.KEEP)
        with monkeypatch.context() as patched:
            patched.setattr("asyncrl.weights.targets.MemoryTarget.write", fail)
            with pytest.raises(WeightSyncError, match="reads back differently"):
                await rig.apply(1, 0)
        assert (await rig.engine.health()).version == NOT_SAMPLED
        with pytest.raises(WeightSyncError, match="writing version 1 did not finish"):
            await rig.engine.resume()
        with pytest.raises(WrongBase, match="an anchor is needed"):
            await rig.apply(1, 0)
        await rig.apply(2, None)
        await rig.engine.resume()
        rig.check(await rig.write(rig.prompts[0], Sampling(max_new_tokens=5)))

    rig.run(main())


def test_closing_ends_open_requests(rig: Rig) -> None:
    async def main() -> None:
        await rig.begin()
        task = asyncio.create_task(rig.write(rig.prompts[0], Sampling(max_new_tokens=200)))
        await _until_sampled(rig.engine, 1)
        await rig.engine.close()
        with pytest.raises(ChildDied, match="closed"):
            await task
        with pytest.raises(ChildDied, match="closed"):
            await rig.engine.pause(Interruption.KEEP)

    rig.run(main())


def test_a_forward_that_fails_ends_the_engine_with_its_reason(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no memory left")

    async def main() -> None:
        await rig.begin()
        monkeypatch.setattr("asyncrl.rollout.inline_wave.Wave.step", fail)
        with pytest.raises(ChildDied, match="no memory left"):
            await rig.write(rig.prompts[0], Sampling(max_new_tokens=5))

    rig.run(main())


@pytest.mark.parametrize(("sampling", "named"), [
    (Sampling(top_p=1.5), r"sampling\.top_p = 1\.5"), (Sampling(presence_penalty=0.5), r"sampling\.presence_penalty = 0\.5"),
    (Sampling(repetition_penalty=1.1), r"sampling\.repetition_penalty"), (Sampling(min_new_tokens=2), r"sampling\.min_new_tokens"),
    (Sampling(stop=("x",)), r"sampling\.stop"), (Sampling(temperature=0.0), r"sampling\.temperature"),
])
def test_what_it_cannot_sample_is_refused_by_name(rig: Rig, sampling: Sampling, named: str) -> None:
    with pytest.raises(EngineError, match=named):
        rig.run(rig.write(rig.prompts[0], sampling))


def test_a_token_outside_the_vocabulary_is_refused(rig: Rig) -> None:
    with pytest.raises(EngineError, match="token 48 is outside the vocabulary of 48"):
        rig.run(rig.write(np.asarray([7, 48], np.int32), Sampling()))


def test_sampling_inverts_the_cumulative_distribution_at_temperature() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).repeat(4, 1)
    # softmax(logits / 0.6): 0.8121, 0.1534, 0.0290, 0.0055
    tokens, logprobs, _ = sample(logits, temperatures=torch.full((4,), 0.6), draws=torch.tensor([0.0, 0.8122, 0.9656, 0.9946]).double())
    assert tokens.tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(logprobs.numpy(), [-0.2081, -1.8747, -3.5414, -5.2081], atol=1e-4)


def kept_by_definition(probs: np.ndarray, sampling: Sampling) -> set[int]:
    """The tokens that may be sampled, by the words of each rule, one after another."""
    ranked = np.argsort(-probs, kind="stable").tolist()
    kept = [token for token in ranked if probs[token] >= sampling.min_p * probs.max()][:sampling.top_k]
    share, mass = 0.0, sum(probs[token] for token in kept)
    for count, token in enumerate(kept, 1):
        share += probs[token]
        if share >= sampling.top_p * mass - 1e-12:
            return set(kept[:count])
    return set(kept)


KEPT = (Sampling(), Sampling(top_p=0.8), Sampling(top_k=3), Sampling(min_p=0.2), Sampling(top_p=0.7, top_k=5, min_p=0.05),
        Sampling(top_k=1), Sampling(top_p=1e-6), Sampling(min_p=1.0), Sampling(top_k=1000))


@pytest.mark.parametrize("seed", range(5))
def test_a_kept_set_is_what_its_rules_say_renormalised(seed: int) -> None:
    logits = torch.from_numpy(np.random.default_rng(seed).normal(scale=2.0, size=(len(KEPT), 12))).float()
    plain = torch.log_softmax(logits, dim=-1)
    truncation = Truncation.of([limits_of(sampling) for sampling in KEPT], torch.device("cpu"))
    left = truncation.kept(plain)
    over_the_set = renormalised(plain, left)
    for row, sampling in enumerate(KEPT):
        probs = plain[row].double().exp().numpy()
        kept = kept_by_definition(probs, sampling)
        expected = np.asarray([probs[token] if token in kept else 0.0 for token in range(12)])
        assert set(left[row].nonzero()[:, 0].tolist()) == kept
        np.testing.assert_allclose(over_the_set[row].exp().numpy(), expected / expected.sum(), atol=1e-6)
    assert torch.equal(over_the_set[0], plain[0]), "a row that keeps all stays as it is, to the bit"


def test_a_kept_set_leaves_the_other_requests_of_a_wave_as_they_are(rig: Rig) -> None:
    async def main() -> None:
        await rig.begin()
        alone = await rig.write(rig.prompts[0], Sampling(max_new_tokens=6), seed=LONG_SEED)
        beside, greedy = await asyncio.gather(rig.write(rig.prompts[0], Sampling(max_new_tokens=6), seed=LONG_SEED),
                                              rig.write(rig.prompts[0], Sampling(max_new_tokens=6, top_k=1)))
        assert np.array_equal(alone.tokens, beside.tokens)
        assert not greedy.logprobs.any(), "the only token that is kept has probability 1"

    rig.run(main())


def test_sampling_never_picks_a_token_of_probability_zero() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    draws = torch.tensor([0.0, 0.4999999, 0.5, 1 - 1e-16]).double()
    tokens, *_ = sample(logits.repeat(4, 1), temperatures=torch.ones(4), draws=draws)
    assert tokens.tolist() == [1, 1, 3, 3]


@pytest.mark.parametrize("row", [[torch.nan, 0.0], [torch.inf, 0.0], [-torch.inf, -torch.inf]])
def test_a_row_of_logits_without_a_distribution_has_no_logprob(row: list[float]) -> None:
    _, logprobs, _ = sample(torch.tensor([row, [0.0, 0.0]]), temperatures=torch.ones(2), draws=torch.zeros(2).double())
    assert torch.isnan(logprobs[0])
    assert logprobs[1] == pytest.approx(-np.log(2))


def test_a_broken_row_ends_its_request_and_no_other(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_first(logits: torch.Tensor, **arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        steps.append(1)
        if len(steps) == 3:
            logits = logits.clone()
            logits[0, 2] = torch.nan
        return sample(logits, **arguments)

    async def main() -> None:
        await rig.begin()
        monkeypatch.setattr("asyncrl.rollout.inline_wave.sample", break_first)
        broken, *whole = await asyncio.gather(*(rig.write(rig.prompts[1], Sampling(max_new_tokens=6), seed=LONG_SEED) for _ in range(3)))
        assert [(len(chunk.tokens), chunk.finish) for chunk in broken.chunks] == [(2, None), (0, Status.NONFINITE_LOGPROB)]
        assert np.isfinite(broken.logprobs).all()
        for one in whole:
            rig.check(one)

    steps: list[int] = []
    rig.run(main())


async def _until_sampled(engine: InlineEngine, count: int) -> None:
    for _ in range(1000):
        if engine._wave is not None and engine._wave.rows[0].sampled_tokens >= count:
            return
        await asyncio.sleep(0)
    raise AssertionError(f"the first request of the wave did not reach {count} tokens")


def _rig(model: PublishedModel, runner: asyncio.Runner, **settings: int) -> Rig:
    engine = InlineEngine(model.folder, **settings)
    runner.run(engine.start(model.paths))
    return Rig(engine, runner.run, model.manifest, model.truth, EOS_TOKENS, prompts(16), distributions=model.distributions)
