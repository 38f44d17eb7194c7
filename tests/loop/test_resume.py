"""A run goes on in another process where a checkpoint left it: same weights, same order, every prompt once, every token accounted."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from pathlib import Path

import pytest

from asyncrl.buffer.replay_buffer import ReplayBuffer
from asyncrl.errors import ConfigError, RunStopped
from asyncrl.loop import Run
from asyncrl.rollout.env import SingleTurn
from asyncrl.rollout.inline_engine import InlineEngine
from asyncrl.rollout.prompts import Mixture, PromptSource
from asyncrl.run_options import RunOptions
from asyncrl.run_state import RunState, load_state
from asyncrl.step_report import StepReport
from asyncrl.train import checkpoint_store
from asyncrl.train.trainer import Trainer
from asyncrl.types import Prompt, Sampling
from asyncrl.weights.config import WeightsConfig
from tests.loop.test_run import LIMIT_S, NO_LIMIT, fake, variety
from tests.tiny_model import make_tiny_model
from tests.train.test_recovery import Fate

GROUPS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def make_run(model: Path, folder: Path, engines: list[object], *, resume: str | None = None, prompts: PromptSource | None = None,
             every_steps: int | None = 1, processes: int = 0, publish_every_steps: int = 1, **buffer: object) -> Run:
    settings = {"groups_per_step": GROUPS, "group_size": 2, "max_staleness": 2, "zero_variance": "keep"} | buffer
    interruption = "drain" if "policy" in buffer else "keep"
    return Run(prompts=prompts or PromptSource([Prompt(text=f"{a}+{b}=") for a, b in itertools.product(range(8), range(8))], epochs=1),
               engine=engines, env=SingleTurn(variety), sampling=Sampling(max_new_tokens=5), buffer=ReplayBuffer(**settings),
               trainer=Trainer(model, correction="token_tis", learning_rate=1e-3, processes=processes, checkpoint_every_steps=every_steps,
                               schedule={"kind": "cosine", "total_steps": 12, "warm_up_steps": 6}),
               options=RunOptions(name="run", folder=folder, probe=NO_LIMIT, resume=resume,
                                  weights=WeightsConfig(dtype="float32", interruption=interruption,
                                                        publish_every_steps=publish_every_steps)))


async def steps_of(run: Run, count: int) -> list[StepReport]:
    return [report async for report in run.steps(count)]


def use(work):
    return asyncio.run(asyncio.wait_for(work, LIMIT_S))


def seen(report: StepReport) -> tuple[object, ...]:
    """What a step was, to the bit."""
    sequences = [(rollout.prompt_id, rollout.group_id, sequence.tokens.tolist(), sequence.rollout_logprobs.tolist(),
                  sequence.policy_versions.tolist()) for rollout in report.batch.rollouts for sequence in rollout.sequences]
    return report.index, report["train/learning_rate/last"], report["train/grad_norm/last"], sequences


@pytest.mark.parametrize("policy", [{"max_staleness": 0}, {"max_staleness": 1, "policy": {"kind": "fixed_lag", "lag_steps": 1}}],
                         ids=["K=0", "fixed_lag"])
def test_at_a_fixed_lag_a_resumed_run_is_the_run_that_was_not_stopped(policy: dict, model: Path, tmp_path: Path) -> None:
    async def whole() -> tuple[list[StepReport], int]:
        async with make_run(model, tmp_path / "whole", [InlineEngine(model)], every_steps=None, **policy) as run:
            return await steps_of(run, 12), (await run.trainer.publish()).state_hash

    async def half(steps: int, resume: str | None) -> tuple[list[StepReport], int]:
        async with make_run(model, tmp_path / "halves", [InlineEngine(model)], every_steps=6, resume=resume, **policy) as run:
            reports = await steps_of(run, steps)
            return reports, (await run.trainer.publish()).state_hash

    reports, state_hash = use(whole())
    first, _ = use(half(8, None))
    second, resumed_hash = use(half(6, "newest"))
    assert [report.index for report in second] == list(range(7, 13))
    if policy["max_staleness"] == 0:
        assert [seen(report) for report in first[:6] + second] == [seen(report) for report in reports]
        assert resumed_hash == state_hash
    else:
        # What was in flight at the checkpoint is written again, by newer weights.
        assert [seen(report) for report in first[:6]] == [seen(report) for report in reports[:6]]
        assert [report.batch.groups[0].prompt.text for report in second] == [report.batch.groups[0].prompt.text for report in reports[6:]]


@pytest.mark.parametrize("seed", range(3))
def test_each_prompt_is_trained_once_whatever_dies_and_when(seed: int, model: Path, tmp_path: Path) -> None:
    """Sixty-three prompts, three a step. Attempts end without a word some steps on, at a random moment of the next; what counts is what
    the last history trained.
    """
    chance = random.Random(seed)
    trained: dict[int, list[str]] = {}

    async def attempt(whole_steps: int, moment_s: float | None, resume: str | None) -> bool:
        prompts = PromptSource([Prompt(text=f"{a}+{b}=") for a, b in itertools.product(range(9), range(7))], epochs=1)
        async with make_run(model, tmp_path, [fake(token_s=0.0005)], resume=resume, every_steps=2, prompts=prompts) as run:
            for index in [index for index in trained if index > run.index]:
                del trained[index]
            try:
                for steps, limit_s in ((whole_steps, None), (100, moment_s)):
                    async with asyncio.timeout(limit_s):
                        async for report in run.steps(steps):
                            trained[report.index] = [group.prompt.text for group in report.batch.groups]
            except TimeoutError:
                return False
            await run.finish()
            account = run.account()
            assert account.is_closed
            assert account.trained.rollouts == 63 * 2
            return True

    for number in range(4):
        assert not use(attempt(chance.randint(1, 2), 0.02 * chance.random(), "auto" if number else None))
    assert use(attempt(0, None, "auto"))
    assert sorted(trained) == list(range(1, 22))
    counts = Counter(text for texts in trained.values() for text in texts)
    assert len(counts) == 63
    assert set(counts.values()) == {1}


def test_counters_go_on_and_what_was_in_flight_is_counted_as_dropped(model: Path, tmp_path: Path) -> None:
    async def first() -> RunState:
        async with make_run(model, tmp_path, [fake(token_s=0.005)], depth_groups="max") as run:
            run.notes["tracker"] = "abc"
            await steps_of(run, 3)
            await run.save()
            return run.state()

    async def second() -> None:
        async with make_run(model, tmp_path, [fake(token_s=0.005)], depth_groups="max", resume="newest") as run:
            assert run.notes == {"tracker": "abc"}
            account = run.ledger.account(buffered=(0, 0), in_flight=(0, 0))
            assert account == saved.account
            assert account.is_closed
            assert account.dropped["resume"].rollouts > 0
            assert run.buffer.state() == saved.buffer
            reports = await steps_of(run, 2)
            assert [report.index for report in reports] == [4, 5]
            assert reports[0].batch.groups[0].group_id >= saved.buffer["next_group_id"]
            again = [group.prompt for report in reports for group in report.batch.groups]
            assert again[:3] == list(saved.unfinished[:3])
            run.account()

    saved = use(first())
    assert load_state(checkpoint_store.newest(tmp_path / "run" / "checkpoints")) == saved
    use(second())


def test_engines_begin_with_the_weights_of_the_checkpoint(model: Path, tmp_path: Path) -> None:
    async def first() -> int:
        async with make_run(model, tmp_path, [InlineEngine(model)], max_staleness=0) as run:
            await steps_of(run, 3)
            return (await run.trainer.publish()).state_hash

    async def second() -> None:
        async with make_run(model, tmp_path, [InlineEngine(model)], max_staleness=0, resume="newest") as run:
            manifest = await run.trainer.publish()
            assert (manifest.version, manifest.state_hash, manifest.run_epoch) == (3, published, 1)
            (report,) = await steps_of(run, 1)
            sequences = [sequence for rollout in report.batch.rollouts for sequence in rollout.sequences]
            assert {span.policy_version for sequence in sequences for span in sequence.spans} == {3}

    published = use(first())
    use(second())


def test_the_newest_whole_checkpoint_wins_over_a_damaged_one(model: Path, tmp_path: Path) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"

    async def go(steps: int, resume: str | None) -> list[int]:
        async with make_run(model, tmp_path, [fake()], resume=resume) as run:
            return [report.index for report in await steps_of(run, steps)]

    assert use(go(4, None)) == [1, 2, 3, 4]
    assert sorted(path.name for path in checkpoints.glob("step-*")) == ["step-00000003", "step-00000004"]
    (checkpoints / "step-00000004" / checkpoint_store.STATE).write_bytes(b"")
    with pytest.warns(UserWarning, match="passed over"):
        assert use(go(2, "newest")) == [4, 5]
    assert use(go(1, "newest")) == [6]


def test_resuming_needs_a_checkpoint_and_a_new_run_a_folder_without_one(model: Path, tmp_path: Path) -> None:
    async def go(resume: str | None) -> list[int]:
        async with make_run(model, tmp_path, [fake()], resume=resume) as run:
            reports = await steps_of(run, 2)
            await run.save()
            return [report.index for report in reports]

    with pytest.raises(ConfigError, match=r"resume.*at least one whole checkpoint.*begins anew"):
        use(go("newest"))
    assert use(go("auto")) == [1, 2]
    with pytest.raises(ConfigError, match=r"run\.name.*without checkpoints"):
        use(go(None))
    assert use(go("auto")) == [3, 4]


def test_a_run_that_is_told_to_stop_finishes_its_step_and_saves_the_rest(model: Path, tmp_path: Path) -> None:
    async def stopped() -> int:
        async with make_run(model, tmp_path, [fake(token_s=0.01)], every_steps=None) as run:
            await steps_of(run, 3)
            asyncio.get_running_loop().call_later(0.01, run.stop)
            with pytest.raises(RunStopped):
                await steps_of(run, 100)
            with pytest.raises(RunStopped):
                await run.step()
            await run.save()
            return run.index

    async def resumed() -> list[int]:
        async with make_run(model, tmp_path, [fake()], resume="newest") as run:
            return [report.index for report in await steps_of(run, 1)]

    index = use(stopped())
    assert index >= 3
    assert use(resumed()) == [index + 1]


def test_a_run_saves_though_a_rank_dies_while_it_writes(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fate = Fate()
    monkeypatch.setattr("asyncrl.train.rank_group.ChildRanks", fate)

    async def saved() -> None:
        async with make_run(model, tmp_path, [fake()], every_steps=None, processes=1) as run:
            await steps_of(run, 2)
            fate.deaths = {len(fate.calls) + 1: "before"}
            await run.save()
            checkpoint = checkpoint_store.newest(run.paths.checkpoints)
            assert checkpoint is not None
            assert load_state(checkpoint).index == 2

    use(saved())
    assert fate.starts == 2


def test_a_run_that_fails_keeps_the_checkpoint_that_was_being_written(model: Path, tmp_path: Path) -> None:
    async def failing() -> None:
        async with make_run(model, tmp_path, [fake()], every_steps=2) as run:
            await steps_of(run, 2)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        use(failing())
    checkpoint = checkpoint_store.newest(tmp_path / "run" / "checkpoints")
    assert checkpoint is not None
    assert load_state(checkpoint).index == 2


@pytest.mark.parametrize("stuck", [False, True], ids=["dead", "silent"])
def test_a_run_that_fails_waits_for_no_rank_that_cannot_finish_its_checkpoint(stuck: bool, model: Path, tmp_path: Path,
                                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    fate = Fate()
    monkeypatch.setattr("asyncrl.train.rank_group.ChildRanks", fate)
    monkeypatch.setattr("asyncrl.train.trainer._CLOSE_SAVING_S", 0.05)

    async def failing() -> None:
        async with make_run(model, tmp_path, [fake()], every_steps=2, processes=1) as run:
            await steps_of(run, 2)
            fate.deaths = {len(fate.calls): "silence" if stuck else "before"}
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        use(failing())
    assert fate.starts == 1, "nothing is started again for it"
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_the_first_probe_comes_before_the_first_step_wherever_a_run_goes_on(model: Path, tmp_path: Path) -> None:
    async def go(steps: int, resume: str | None) -> list[StepReport]:
        async with make_run(model, tmp_path, [InlineEngine(model)], resume=resume, publish_every_steps=2) as run:
            return await steps_of(run, steps)

    assert [report.index for report in use(go(3, None)) if "probe/gap/mean" in report.metrics] == [1]
    assert [report.index for report in use(go(3, "newest")) if "probe/gap/mean" in report.metrics] == [4]


def test_a_mixture_goes_on_with_its_shares_shuffles_and_sources(model: Path, tmp_path: Path) -> None:
    def mixture() -> Mixture:
        return Mixture({name: PromptSource([Prompt(text=f"{a}{sign}{b}=", columns={"key": (a, b)}) for a in range(4) for b in range(6)],
                                           epochs=epochs, shuffle="full")
                        for name, sign, epochs in (("sums", "+", 2), ("differences", "-", 1))}, weights={"sums": 2.0})

    async def half(steps: int, resume: str | None) -> list[Prompt]:
        async with make_run(model, tmp_path, [fake()], resume=resume, every_steps=2, prompts=mixture()) as run:
            return [group.prompt for report in await steps_of(run, steps) for group in report.batch.groups]

    asked = use(half(7, None))[:6 * GROUPS] + use(half(100, "newest"))
    counts = Counter((prompt.source, prompt.row) for prompt in asked)
    assert counts == {(name, row): times for name, times in (("sums", 2), ("differences", 1)) for row in range(24)}
    assert len({prompt.prompt_id for prompt in asked}) == len(asked) == 72
    assert all(prompt.row == 6 * prompt.columns["key"][0] + prompt.columns["key"][1] for prompt in asked)
    shares = [sum(prompt.source == "sums" for prompt in asked[start:start + 18]) for start in range(0, 72, 18)]
    assert all(abs(share - 12) <= 3 for share in shares)
