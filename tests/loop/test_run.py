"""The run with scripted engines and the real trainer: several engines, publish intervals, the end of the data, failures that surface."""

from __future__ import annotations

import asyncio
import itertools
import zlib
from pathlib import Path

import pytest

from asyncrl.buffer.replay_buffer import ReplayBuffer
from asyncrl.errors import ConfigError, RunAborted
from asyncrl.loop import Run
from asyncrl.rollout.env import SingleTurn
from asyncrl.rollout.fake_engine import FakeEngine
from asyncrl.rollout.inline_engine import InlineEngine
from asyncrl.rollout.prompts import PromptSource
from asyncrl.rollout.task_config import ProbeConfig
from asyncrl.run_options import RunOptions
from asyncrl.step_report import StepReport
from asyncrl.train.trainer import Trainer
from asyncrl.types import Prompt, Sampling
from asyncrl.weights.config import WeightsConfig
from tests.tiny_model import make_tiny_model

LIMIT_S = 60
NO_LIMIT = ProbeConfig(max_mean_gap=1e9)
"""For engines whose logprobs are scripted."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def variety(prompt: Prompt, completion: str) -> float:
    return zlib.crc32(f"{prompt.prompt_id} {completion}".encode()) % 97 / 97.0


def make_run(model: Path, folder: Path, engines: list[object], *, prompts: PromptSource | None = None, probe: ProbeConfig = NO_LIMIT,
             publish_every_steps: int = 1, interruption: str = "keep", reward: object = variety, **buffer: object) -> Run:
    settings = {"groups_per_step": 3, "group_size": 2, "max_staleness": 2, "zero_variance": "keep"} | buffer
    return Run(prompts=prompts or PromptSource([Prompt(text=f"{number}+1=") for number in range(10)]), engine=engines,
               env=SingleTurn(reward), sampling=Sampling(max_new_tokens=5), buffer=ReplayBuffer(**settings),
               trainer=Trainer(model, correction="token_tis", learning_rate=1e-3, processes=0),
               options=RunOptions(name="run", folder=folder, probe=probe, weights=WeightsConfig(
                   dtype="float32", publish_every_steps=publish_every_steps, interruption=interruption)))


def train(run: Run, steps: int) -> tuple[list[StepReport], Run]:
    async def main() -> list[StepReport]:
        async with run:
            reports = [report async for report in run.steps(steps)]
            await run.finish()
            assert run.account().is_closed
            return reports

    return asyncio.run(asyncio.wait_for(main(), LIMIT_S)), run


def fake(name: str = "fake", **settings: object) -> FakeEngine:
    return FakeEngine(name=name, **({"token_s": 0.001} | settings))


@pytest.mark.parametrize("interruption", ["keep", "recompute", "drain"])
def test_every_interruption_keeps_bound_and_ledger(model: Path, tmp_path: Path, interruption: str) -> None:
    reports, run = train(make_run(model, tmp_path, [fake(in_place_recompute=False)], interruption=interruption), 8)
    assert [report.index for report in reports] == list(range(1, 9))
    assert all(0.0 <= report["reward/total/mean"] <= 1.0 for report in reports)
    assert max(report["staleness/token/max"] for report in reports) <= 2
    assert run.buffer.version == 8
    if interruption == "drain":
        sequences = [sequence for report in reports for rollout in report.batch.rollouts for sequence in rollout.sequences]
        assert all(len(sequence.spans) == 1 for sequence in sequences), "an update that waits leaves no rollout with two versions"


def test_interrupted_rollouts_are_journaled_with_what_they_had_written(model: Path, tmp_path: Path) -> None:
    _, run = train(make_run(model, tmp_path, [fake(token_s=0.01)], group_size=8, depth_groups="max"), 8)
    partial = [event for event in run.recorder.events if event.kind == "partial"]
    assert partial
    assert all(int(event.detail.split()[0]) >= 1 for event in partial)
    assert [event.subject for event in run.recorder.events if event.kind == "step_done"] == list(range(8))
    assert run.recorder.open_batches == ()


def test_the_probe_waits_for_a_published_version(model: Path, tmp_path: Path) -> None:
    run = make_run(model, tmp_path, [InlineEngine(model)], publish_every_steps=2, probe=ProbeConfig(every_steps=1, max_mean_gap=1e-4))
    reports, _ = train(run, 6)
    probed = [report.index for report in reports if "probe/gap/mean" in report.metrics]
    assert probed == [1, 3, 5]
    assert max(report.metrics.get("probe/gap/max", 0.0) for report in reports) < 1e-4


def test_one_of_two_engines_dies_and_the_run_goes_on(model: Path, tmp_path: Path) -> None:
    engines = [fake("first"), fake("second")]

    async def main() -> list[StepReport]:
        reports = []
        async with make_run(model, tmp_path, engines) as run:
            async for report in run.steps(8):
                reports.append(report)
                if report.index == 3:
                    await engines[0].close()
            await run.finish()
            assert run.account().is_closed
            assert run.router.serving == ("second",)
        return reports

    reports = asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    assert len(reports) == 8
    assert max(report["staleness/token/max"] for report in reports) <= 2


def test_the_data_ends_and_so_does_the_run(model: Path, tmp_path: Path) -> None:
    prompts = PromptSource([Prompt(text=f"{number}+2=") for number in range(5)], epochs=2)
    reports, run = train(make_run(model, tmp_path, [fake()], prompts=prompts), 100)
    assert len(reports) == 3
    trained = {group.prompt.prompt_id for report in reports for group in report.batch.groups}
    assert len(trained) == 9
    assert run.account().dropped["end_of_run"].rollouts == 2


def test_groups_of_equal_rewards_are_replaced_in_the_batches_that_are_trained(model: Path, tmp_path: Path) -> None:
    answers = itertools.count()

    def only_sevens_never_differ(prompt: Prompt, completion: str) -> float:
        return 0.7 if prompt.text == "7+1=" else next(answers) % 97 / 97.0

    reports, run = train(make_run(model, tmp_path, [fake()], reward=only_sevens_never_differ, zero_variance="drop"), 8)
    asked = [group.prompt.text for report in reports for group in report.batch.groups]
    assert len(asked) == 8 * 3
    assert "7+1=" not in asked
    assert run.account().dropped["zero_variance"].rollouts >= run.buffer.config.group_size


def test_prompts_that_leave_no_room_are_skipped_and_counted(model: Path, tmp_path: Path) -> None:
    prompts = PromptSource([Prompt(text="1" * 300), Prompt(text="1+1=")])
    reports, run = train(make_run(model, tmp_path, [InlineEngine(model)], prompts=prompts), 2)
    assert all(group.prompt.text == "1+1=" for report in reports for group in report.batch.groups)
    assert run.prompts.skipped >= 6


def test_a_reward_that_always_fails_ends_the_run_with_its_traceback(model: Path, tmp_path: Path) -> None:
    def broken(prompt: Prompt, completion: str) -> float:
        raise ZeroDivisionError("a line of the reward")

    with pytest.raises(RunAborted, match="a line of the reward"):
        train(make_run(model, tmp_path, [fake()], reward=broken), 3)


def test_an_engine_whose_logprobs_are_not_the_models_is_refused_before_the_first_step(model: Path, tmp_path: Path) -> None:
    with pytest.raises(RunAborted, match="parity probe"):
        train(make_run(model, tmp_path, [fake()], probe=ProbeConfig()), 1)


def test_stale_data_without_a_chosen_correction_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="correction"):
        Run(prompts=PromptSource([Prompt(text="1+1=")]), engine=fake(), env=SingleTurn(variety), sampling=Sampling(),
            buffer=ReplayBuffer(groups_per_step=1, group_size=2, max_staleness=1), trainer=Trainer(model, learning_rate=1e-3, processes=0))


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_fixed_lag_trains_batches_of_exactly_that_age(model: Path, tmp_path: Path, lag: int) -> None:
    run = make_run(model, tmp_path, [InlineEngine(model)], interruption="drain", policy={"kind": "fixed_lag", "lag_steps": lag},
                   probe=ProbeConfig(every_steps=1))
    reports, _ = train(run, 6)
    assert [report["staleness/token/max"] for report in reports] == [float(min(lag, step)) for step in range(6)]
    assert [report["staleness/token/mean"] for report in reports] == [float(min(lag, step)) for step in range(6)]
