"""Evaluations of a real run: the same twice, each set by itself, the best weights exported."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest

from asyncrl.buffer.replay_buffer import ReplayBuffer
from asyncrl.config import parse_config
from asyncrl.errors import ConfigError, RunAborted
from asyncrl.loop import Run, RunOptions
from asyncrl.observe.console import Console
from asyncrl.observe.plain import PlainFace
from asyncrl.rollout.engine import Engine
from asyncrl.rollout.env import SingleTurn
from asyncrl.rollout.eval_set import EvalSet
from asyncrl.rollout.evaluation import Evaluation
from asyncrl.rollout.inline_engine import InlineEngine
from asyncrl.rollout.prompts import PromptSource
from asyncrl.train.trainer import Trainer
from asyncrl.training import train
from asyncrl.types import Prompt, Sampling
from asyncrl.weights.config import WeightsConfig
from tests.loop.test_run import LIMIT_S, NO_LIMIT, fake, variety
from tests.rollout.rollout_fakes import requests_of
from tests.tiny_model import make_tiny_model

TASK = Path(__file__).parents[1] / "effects_task.py"
SUMS = EvalSet("sums", tuple(Prompt(text=f"{number}+2=") for number in range(6)), samples_per_prompt=3, pass_at=(1, 2), success_reward=0.5)
COOL = dataclasses.replace(SUMS, name="cool", samples_per_prompt=1, pass_at=(), sampling=Sampling(temperature=0.01, max_new_tokens=3))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def make_run(model: Path, folder: Path, engine: Engine, *sets: EvalSet) -> Run:
    return Run(prompts=PromptSource([Prompt(text=f"{number}+1=") for number in range(10)]), engine=engine, env=SingleTurn(variety),
               sampling=Sampling(max_new_tokens=5),
               buffer=ReplayBuffer(groups_per_step=3, group_size=2, max_staleness=1, zero_variance="keep"),
               trainer=Trainer(model, correction="token_tis", learning_rate=1e-3, processes=0),
               options=RunOptions(name="run", folder=folder, probe=NO_LIMIT, weights=WeightsConfig(dtype="float32"), eval_sets=sets))


def evaluations(run: Run, *, steps: int = 0) -> list[Evaluation]:
    """Two evaluations after so many steps, with rollouts for training going on beside them."""
    async def main() -> list[Evaluation]:
        async with run:
            async for _ in run.steps(steps):
                pass
            return [await run.evaluate(), await run.evaluate()]

    return asyncio.run(asyncio.wait_for(main(), LIMIT_S))


@pytest.mark.parametrize("steps", [0, 3])
def test_two_evaluations_of_one_version_are_equal(model: Path, tmp_path: Path, steps: int) -> None:
    first, second = evaluations(make_run(model, tmp_path, InlineEngine(model), SUMS, COOL), steps=steps)
    assert first == second
    assert (first.version, first.version_min, first.version_max) == (steps, steps, steps)
    assert 0.0 < first["sums"].metrics["pass_at_1/mean"] < first["sums"].metrics["pass_at_2/mean"]
    assert (first["sums"].num_rollouts, first["cool"].num_rollouts) == (18, 6)


def test_a_set_measures_the_same_whatever_other_sets_there_are(model: Path, tmp_path: Path) -> None:
    alone, _ = evaluations(make_run(model, tmp_path / "alone", InlineEngine(model), SUMS))
    third, _ = evaluations(make_run(model, tmp_path / "third", InlineEngine(model), COOL, dataclasses.replace(SUMS, name="twin"), SUMS))
    assert alone["sums"] == third["sums"]
    lengths = [third[name].metrics["completion_tokens/stderr"] for name in ("twin", "sums")]  # rewards here depend on the prompt's id
    assert lengths[0] != lengths[1], "another name, other seeds"


def test_a_set_is_sampled_as_it_says_and_others_as_the_run(model: Path, tmp_path: Path) -> None:
    engine = fake()
    evaluations(make_run(model, tmp_path, engine, SUMS, COOL))
    asked = {(request.sampling.temperature, request.sampling.max_new_tokens) for request in requests_of(engine)}
    assert asked == {(1.0, 5), (0.01, 3)}


def test_a_set_may_be_judged_by_a_reward_of_its_own_whatever_the_sources_of_training_are_called(model: Path, tmp_path: Path) -> None:
    own = SingleTurn({"strict": lambda prompt, completion: float(prompt.source == "eval/train")})
    strict = dataclasses.replace(SUMS, name="train", env=own)

    async def main() -> tuple[Evaluation, set[str]]:
        async with make_run(model, tmp_path, fake(), SUMS, strict) as run:
            report = await run.step()
            return await run.evaluate(), {name for rollout in report.batch.rollouts for name in rollout.rewards}

    evaluation, trained_by = asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    assert evaluation["train"].reward == 1.0
    assert evaluation["sums"].reward not in (0.0, 1.0)
    assert trained_by == {"variety"}


def test_what_an_engine_cannot_sample_is_refused_before_anything_starts(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^eval\.sets\.sums\.sampling\.top_p = 0\.9 .*fake"):
        make_run(model, tmp_path, fake(), dataclasses.replace(SUMS, sampling=Sampling(top_p=0.9)))
    make_run(model, tmp_path, InlineEngine(model), dataclasses.replace(SUMS, sampling=Sampling(top_p=0.9)))


def trained(tmp_path: Path, lines: list[str], *, steps: int, resume: str | None = None, **eval_settings: object) -> Path:
    """The folder of a run of the main job."""
    model = make_tiny_model(tmp_path / "model")
    data = {"kind": "function", "function": f"{TASK}:questions"}
    config = parse_config({
        "model": {"kind": "folder", "path": str(model)}, "prompts": data, "engine": {"kind": "inline"}, "sampling": {"max_new_tokens": 4},
        "env": {"kind": "single_turn", "reward": f"{TASK}:varied"}, "buffer": {"groups_per_step": 2, "group_size": 4, "max_staleness": 1},
        "advantages": "grpo", "correction": "token_tis", "loss": "decoupled_ppo", "trainer": {"learning_rate": 1e-3, "processes": 0},
        "eval": {"kind": "sets", "every_steps": 2, "sets": {"sums": {"prompts": data, "samples_per_prompt": 2, "pass_at": [1, 2]}}}
        | eval_settings, "weights": {"publish_every_steps": 2, "dtype": "float32"},
        "run": {"name": "run", "steps": steps, "folder": str(tmp_path)}}, base=tmp_path)
    console = Console(PlainFace(lines.append))
    try:
        asyncio.run(asyncio.wait_for(train(config, console=console, resume=resume), LIMIT_S))
    finally:
        console.close()
    return tmp_path / "run"


def test_the_weights_of_the_best_evaluation_are_kept_and_the_summary_says_which(tmp_path: Path) -> None:
    lines: list[str] = []
    folder = trained(tmp_path, lines, steps=3)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rewards = {row["eval/step/last"]: row["eval/sums/reward/mean"] for row in rows if "eval_version" in row}
    assert [row["eval_version"] for row in rows if "eval_version" in row] == list(rewards) == [0, 2, 3], "the last one publishes first"
    best = max(rewards, key=lambda step: (rewards[step], -step))
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert (summary["best_step"], summary["best_reward"]) == (best, rewards[best])
    assert (summary["eval_before"], summary["eval_after"]) == (rewards[0], rewards[3])
    record = json.loads((folder / "best" / "evaluation.json").read_text(encoding="utf-8"))
    assert (record["step"], record["version"], record["value"]) == (best, best, rewards[best])
    final, kept = ((folder / name / "model.safetensors").read_bytes() for name in ("model", "best"))
    assert (final == kept) is (best == 3)
    assert (folder / "best" / "tokenizer.json").is_file()
    told = " ".join(" ".join(lines).split())
    assert f"version 2, sums {rewards[2]:.3f} from {rewards[0]:.3f}, pass@1 " in told
    assert told.count("the best evaluation so far") == sum(rewards[step] > max([rewards[before] for before in rewards if before < step],
                                                                               default=-1.0) for step in rewards)


def test_a_recipe_may_give_a_set_a_reward_of_its_own(tmp_path: Path) -> None:
    data = {"kind": "function", "function": f"{TASK}:questions"}
    sets = {"plain": {"prompts": data}, "two": {"prompts": data, "env": {"reward": f"{TASK}:always_two"}}}
    folder = trained(tmp_path, [], steps=1, sets=sets)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["eval/two/reward/mean"] for row in rows if "eval_version" in row] == [2.0, 2.0]
    assert all(row["eval/plain/reward/mean"] < 1.0 for row in rows if "eval_version" in row)
    assert all(row["reward/total/mean"] < 1.0 for row in rows if "step" in row)


def test_a_resumed_run_goes_on_from_its_best_and_evaluates_no_step_twice(tmp_path: Path) -> None:
    folder = trained(tmp_path, [], steps=2)
    record = folder / "best" / "evaluation.json"
    unbeatable = json.loads(record.read_text(encoding="utf-8"))
    unbeatable |= {"step": 2, "version": 2, "metrics": unbeatable["metrics"] | {"eval/sums/reward/mean": 2.0}}
    record.write_text(json.dumps(unbeatable), encoding="utf-8")
    assert trained(tmp_path, [], steps=4, resume="newest") == folder
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["eval/step/last"] for row in rows if "eval_version" in row] == [0, 2, 4]
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert (summary["best_step"], summary["best_reward"]) == (2, 2.0)
    assert json.loads(record.read_text(encoding="utf-8")) == unbeatable


def test_a_run_resumed_between_two_evaluations_evaluates_where_a_run_that_was_not_stopped_does(tmp_path: Path) -> None:
    folder = trained(tmp_path, [], steps=3)
    metrics = folder / "metrics.jsonl"
    *before, last = metrics.read_text(encoding="utf-8").splitlines()
    assert json.loads(last)["eval/step/last"] == 3
    metrics.write_text("".join(f"{line}\n" for line in before), encoding="utf-8")
    trained(tmp_path, [], steps=4, resume="newest")
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    assert [row["eval/step/last"] for row in rows if "eval_version" in row] == [0, 2, 4]


def test_a_first_evaluation_that_measures_nothing_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    lines: list[str] = []
    with pytest.raises(RunAborted, match=r"eval\.sets\.sums: each of its 2 rollouts failed, the last with prompt_too_long"):
        trained(tmp_path, lines, steps=1, sets={"sums": {"prompts": {"kind": "function", "function": f"{TASK}:too_long"}}})
    assert "warning: evaluation of sums: each of 2 rollouts failed, the last with prompt_too_long" in " ".join(" ".join(lines).split())
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8"))
    assert row["eval/sums/error.prompt_too_long/sum"] == 2
    assert "eval/sums/reward/mean" not in row
