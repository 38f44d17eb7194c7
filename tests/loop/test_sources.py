"""Runs whose prompts come from several sources, or come again: shares, rewards, temperatures, pass rates."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from asyncrl.buffer.replay_buffer import ReplayBuffer
from asyncrl.errors import ConfigError
from asyncrl.loop import Run, RunOptions, StepReport
from asyncrl.rollout.env import SingleTurn
from asyncrl.rollout.inline_engine import InlineEngine
from asyncrl.rollout.prompts import Mixture, PromptSource
from asyncrl.rollout.task_config import ProbeConfig
from asyncrl.train.trainer import Trainer
from asyncrl.types import Prompt, Sampling
from asyncrl.weights.config import WeightsConfig
from tests.tiny_model import make_tiny_model

LIMIT_S = 60
HOT, COLD = Sampling(temperature=1.5, max_new_tokens=6), Sampling(temperature=0.4, max_new_tokens=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def questions(sign: str, count: int = 4) -> list[Prompt]:
    return [Prompt(text=f"{number}{sign}1=", columns={"number": number}) for number in range(count)]


def variety(prompt: Prompt, completion: str) -> float:
    return sum((index + 1) * (ord(character) % 7) for index, character in enumerate(completion)) / 10.0


def make_run(model: Path, folder: Path, prompts: PromptSource, *, env: Any, sampling: Any = HOT, **buffer: Any) -> Run:
    return Run(prompts=prompts, engine=InlineEngine(model), env=env, sampling=sampling,
               buffer=ReplayBuffer(**({"groups_per_step": 3, "group_size": 2, "max_staleness": 0, "zero_variance": "keep"} | buffer)),
               trainer=Trainer(model, correction="token_tis", learning_rate=3e-3, processes=0),
               options=RunOptions(folder=folder, probe=ProbeConfig(every_steps=1, max_mean_gap=1e-4),
                                  weights=WeightsConfig(dtype="float32", interruption="drain")))


def train(run: Run, steps: int) -> list[StepReport]:
    async def main() -> list[StepReport]:
        async with run:
            return [report async for report in run.steps(steps)]

    return asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_a_batch_of_two_temperatures_is_exactly_on_policy_and_counted_by_source(model: Path, tmp_path: Path) -> None:
    prompts = Mixture({"sums": PromptSource(questions("+")), "differences": PromptSource(questions("-"))}, weights={"sums": 2.0})
    env = {"sums": SingleTurn({"variety": variety}), "differences": SingleTurn({"one": lambda prompt, completion: 1.0})}
    reports = train(make_run(model, tmp_path, prompts, env=env, sampling={"sums": HOT, "differences": COLD}), 4)
    for report in reports:
        assert report["correction/update_ratio/max"] == 1.0 == report["correction/update_ratio/min"]
        assert report["correction/logprob_gap/max"] < 1e-4
        assert report["probe/gap/max"] < 1e-4
        assert (report["buffer/source.sums/groups"], report["buffer/source.differences/groups"]) == (2, 1)
        assert report["reward/source.differences/mean"] == report["reward/function.one/mean"] == 1.0
        assert report["reward/source.sums/mean"] == pytest.approx(report["reward/function.variety/mean"])
        rollouts = report.batch.rollouts
        assert {(rollout.source, rollout.sampling.temperature) for rollout in rollouts} == {("sums", 1.5), ("differences", 0.4)}
        assert report["buffer/source.sums/tokens"] == sum(rollout.num_tokens for rollout in rollouts if rollout.source == "sums")
    assert reports[-1]["prompts/epoch.sums/last"] >= 1


def test_a_mapping_that_misses_a_source_is_refused_before_anything_starts(model: Path, tmp_path: Path) -> None:
    prompts = Mixture({"sums": PromptSource(questions("+")), "differences": PromptSource(questions("-"))})
    with pytest.raises(ConfigError, match=r"sampling = .*Add \['differences'\]"):
        make_run(model, tmp_path, prompts, env=SingleTurn(variety), sampling={"sums": HOT})
    with pytest.raises(ConfigError, match=r"sampling\.sums\.repetition_penalty"):
        make_run(model, tmp_path, prompts, env=SingleTurn(variety), sampling={"sums": Sampling(repetition_penalty=1.2), "differences": HOT})
    with pytest.raises(ConfigError, match=r"env = .*Did you mean 'differences'"):
        make_run(model, tmp_path, prompts, env={"sums": SingleTurn(variety), "difference": SingleTurn(variety)})


def test_prompts_solved_always_or_never_are_passed_over_and_looked_at_again(model: Path, tmp_path: Path) -> None:
    tried: Counter[int] = Counter()

    def by_number(prompt: Prompt, completion: str) -> float:
        number = prompt.columns["number"]
        tried[number] += 1
        return float({0: 1, 1: 0}.get(number, tried[number] % 2))

    curriculum = {"kind": "pass_rate", "min_rollouts": 4, "recheck_after_prompts": 8}
    prompts = PromptSource(questions("+", 3), curriculum=curriculum)
    reports = train(make_run(model, tmp_path, prompts, env=SingleTurn(by_number), groups_per_step=1, group_size=4), 20)
    asked = Counter(group.prompt.columns["number"] for report in reports for group in report.batch.groups)
    assert asked[2] > 2 * asked[0]
    assert 2 <= asked[0] <= 5
    assert 2 <= asked[1] <= 5
    last = reports[-1].metrics
    assert last["prompts/skipped_solved.train/last"] > 0 < last["prompts/skipped_hopeless.train/last"]
    assert last["prompts/rechecked.train/last"] >= 2
