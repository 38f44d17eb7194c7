"""Engines and trainer in turns: the same bits as without, memory that is really given back, and deaths that are deaths."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.buffer.replay_buffer import ReplayBuffer
from asyncrl.colocation_config import NoColocation, TurnsColocation
from asyncrl.errors import ConfigError
from asyncrl.loop import Run
from asyncrl.rollout.engine import Engine
from asyncrl.rollout.env import SingleTurn
from asyncrl.rollout.fake_engine import FakeEngine
from asyncrl.rollout.inline_engine import InlineEngine
from asyncrl.rollout.prompts import PromptSource
from asyncrl.rollout.task_config import ProbeConfig
from asyncrl.rollout.transformers_engine import TransformersEngine
from asyncrl.run_options import RunOptions
from asyncrl.train.trainer import Trainer
from asyncrl.types import Prompt, Sampling
from asyncrl.weights.config import WeightsConfig
from tests.tiny_model import make_tiny_model

ON_POLICY: dict[str, Any] = {"max_staleness": 0}
LAG = {"max_staleness": 1, "policy": {"kind": "fixed_lag", "lag_steps": 1}}
STEPS = 3
MIB = 2**20


def reward(prompt: Prompt, completion: str) -> float:
    return sum((index + 1) * (ord(character) % 7) for index, character in enumerate(completion)) / 10.0


def make_run(model: Path, folder: Path, engine: Engine, *, colocation: NoColocation | TurnsColocation, processes: int = 0,
             buffer: dict[str, Any] = ON_POLICY, weights: WeightsConfig | None = None) -> Run:
    prompts = [Prompt(text=f"{number}+{number % 7}=") for number in range(10)]
    return Run(prompts=PromptSource(prompts), engine=engine, env=SingleTurn(reward, workers=1), sampling=Sampling(max_new_tokens=8),
               buffer=ReplayBuffer(groups_per_step=2, group_size=3, zero_variance="keep", **buffer),
               trainer=Trainer(model, correction="token_tis", learning_rate=1e-3, processes=processes),
               options=RunOptions(name="run", folder=folder, colocation=colocation, probe=ProbeConfig(every_steps=2, max_mean_gap=1e-4),
                                  weights=weights or WeightsConfig(dtype="float32", interruption="drain")))


async def course(run: Run, *, observe: Callable[[Run], None] = lambda run: None) -> list[tuple[Any, ...]]:
    """Of each step the tokens, the rewards and the hash of the weights after it; of the last its metrics too, in the end."""
    found: list[tuple[Any, ...]] = []
    async with run:
        step = run.trainer.step

        async def observed(batch):
            observe(run)
            return await step(batch)

        run.trainer.step = observed
        async for report in run.steps(STEPS):
            tokens = tuple(tuple(rollout.sequences[0].tokens.tolist()) for rollout in report.batch.rollouts)
            rewards = tuple(rollout.reward for rollout in report.batch.rollouts)
            found.append((tokens, rewards, (await run.trainer.publish()).state_hash))
            metrics = report.metrics
        await run.weights.applied()
    return [*found, metrics]


@pytest.mark.parametrize("buffer", [ON_POLICY, LAG], ids=["on policy", "fixed lag"])
@pytest.mark.parametrize("kept", ["offload", "keep"])
def test_turns_change_no_token_no_reward_and_no_weight(tmp_path: Path, buffer: dict[str, Any], kept: Any) -> None:
    model = make_tiny_model(tmp_path / "model")
    plain, turns = (
        asyncio.run(course(make_run(model, tmp_path / colocation.kind, InlineEngine(model), colocation=colocation, buffer=buffer)))
        for colocation in (NoColocation(), TurnsColocation(trainer=kept)))
    assert plain[:-1] == turns[:-1]
    assert len({state_hash for *_, state_hash in plain[:-1]}) == STEPS
    assert "probe/gap/mean" in turns[-1], "the probe was not judged in the trainer's turn"
    measured = {name for name in turns[-1] if name.startswith("colocation/")}
    moved = {f"colocation/{name}/last" for name in ("offload_s", "onload_s", "trainer_moved_bytes")}
    always = {f"colocation/{name}/last" for name in ("engine_freed_bytes", "engine_resident_bytes", "sleep_s", "wake_s")}
    assert measured == always | (moved if kept == "offload" else set())
    assert not any(name.startswith("colocation/") for name in plain[-1])


def test_the_trainer_has_published_and_left_before_an_engine_loads(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    run = make_run(model, tmp_path, InlineEngine(model), colocation=TurnsColocation())
    story: list[str] = []

    def told(owner: Any, name: str) -> None:
        work = getattr(owner, name)

        async def tell(*arguments: Any, **settings: Any) -> Any:
            result = await work(*arguments, **settings)
            story.append(name)
            return result

        setattr(owner, name, tell)

    for owner, name in ((run.trainer, "publish"), (run.trainer, "offload"), (run.engines[0], "start"), (run.engines[0], "apply")):
        told(owner, name)

    async def main() -> None:
        async with run:
            pass

    asyncio.run(main())
    assert story == ["publish", "offload", "start", "publish", "apply"]


@pytest.mark.slow
def test_an_engines_process_gives_its_memory_back_while_a_rank_trains_and_the_run_is_the_same(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", hidden=512, layers=3)
    weight_bytes = 4 * sum(parameter.numel() for parameter in _parameters(model))
    asleep: list[int] = []

    def engine() -> TransformersEngine:
        # one request at a time, so that the one random stream is drawn from in one order
        return TransformersEngine(model, kv_cache_tokens=4096, max_running_requests=1, max_batch_tokens=16)

    def measure(run: Run) -> None:
        asleep.append(_resident_bytes(run.engines[0]._child.pid))

    plain = asyncio.run(course(make_run(model, tmp_path / "plain", engine(), colocation=NoColocation(), processes=1), observe=measure))
    awake, asleep = min(asleep), []
    turns = asyncio.run(course(make_run(model, tmp_path / "turns", engine(), colocation=TurnsColocation(), processes=1), observe=measure))
    assert plain[:-1] == turns[:-1]
    assert weight_bytes > 20 * MIB
    assert max(asleep) <= awake - weight_bytes
    metrics = turns[-1]
    cache_bytes = metrics["colocation/engine_freed_bytes/last"] - weight_bytes
    assert cache_bytes >= 4096 * 3 * 2 * 2 * 128 * 4
    assert max(asleep) <= awake - weight_bytes - cache_bytes // 2
    assert abs(metrics["colocation/engine_resident_bytes/last"] - asleep[-1]) < 4 * MIB
    assert metrics["colocation/trainer_moved_bytes/last"] >= 3 * weight_bytes


def test_an_engine_that_dies_asleep_is_started_anew_in_its_turn(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    run = make_run(model, tmp_path, TransformersEngine(model, kv_cache_tokens=512), colocation=TurnsColocation())
    pids: list[int] = []

    def kill_once(run: Run) -> None:
        pids.append(run.engines[0]._child.pid)
        if len(pids) == 1:
            os.kill(pids[0], signal.SIGKILL)

    *steps, metrics = asyncio.run(course(run, observe=kill_once))
    assert len(steps) == len(pids) == STEPS
    assert len(set(pids)) == 2
    assert metrics["colocation/wake_s/last"] > 0


@pytest.mark.parametrize(("settings", "named"), [
    ({"buffer": {"max_staleness": 1}}, r"colocation\.kind, buffer\.policy\.kind, buffer\.max_staleness = \('turns', 'lease', 1\)"),
    ({"weights": WeightsConfig(anchor_every_versions=5)}, r"colocation\.kind, weights\.anchor_every_versions = \('turns', 5\)"),
    ({"engine": FakeEngine(name="restless")}, r"colocation\.kind, engine\.kind = \('turns', 'restless'\)"),
])
def test_what_cannot_take_turns_is_refused_by_both_names(tmp_path: Path, settings: dict[str, Any], named: str) -> None:
    model = make_tiny_model(tmp_path / "model")
    engine = settings.pop("engine", None)
    if engine is None:
        engine = InlineEngine(model)
    else:
        engine.capabilities = dataclasses.replace(engine.capabilities, sleep=False)
    with pytest.raises(ConfigError, match=named):
        make_run(model, tmp_path, engine, colocation=TurnsColocation(), **settings)


def _parameters(folder: Path) -> list[Any]:
    import torch

    from asyncrl.causal_lm import load_causal_lm

    return list(load_causal_lm(folder, dtype=torch.float32).parameters())


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
