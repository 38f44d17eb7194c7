"""Processes that are really killed: a rank, the engine, the controller. Nothing hangs, nothing is left, nothing is uncounted."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.buffer.replay_buffer import ReplayBuffer
from asyncrl.errors import ChildDied, RunAborted
from asyncrl.loop import Run
from asyncrl.rollout.env import SingleTurn
from asyncrl.rollout.prompts import PromptSource
from asyncrl.rollout.transformers_engine import TransformersEngine
from asyncrl.run_options import RunOptions
from asyncrl.train.trainer import Trainer
from asyncrl.types import Prompt, Sampling
from asyncrl.weights.config import WeightsConfig
from tests.loop.processes import descendants, gone_within
from tests.tiny_model import make_tiny_model

ROOT = Path(__file__).parents[2]
LIMIT_S = 120

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def make_run(model: Path, folder: Path, *engines: TransformersEngine, processes: int, engine_restarts: int = 3) -> Run:
    prompts = [Prompt(text=f"{number}+{number}=") for number in range(10)]
    return Run(prompts=PromptSource(prompts), engine=engines or TransformersEngine(model),
               env=SingleTurn(lambda prompt, text: len(set(text)) / 8.0), sampling=Sampling(max_new_tokens=8),
               buffer=ReplayBuffer(groups_per_step=4, group_size=4, max_staleness=2),
               trainer=Trainer(model, correction="token_tis", learning_rate=1e-3, processes=processes, checkpoint_every_steps=3),
               options=RunOptions(name="run", folder=folder, weights=WeightsConfig(dtype="float32", engine_restarts=engine_restarts)))


def pid_of(name: str) -> int:
    """The child of this process whose log is `name`.log."""
    for pid in descendants(os.getpid()):
        if any(link.endswith(f"/{name}.log") for link in open_files(pid)):
            return pid
    raise AssertionError(f"no child writes {name}.log")


def open_files(pid: int) -> Iterator[str]:
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            yield os.readlink(entry)
        except OSError:
            continue


def test_a_killed_rank_costs_a_restart_and_no_token(model: Path, tmp_path: Path) -> None:
    async def main() -> tuple[list[float], bool, int]:
        run = make_run(model, tmp_path, processes=2)
        restarts = []
        async with run:
            async for report in run.steps(8):
                restarts.append(report.metrics.get("train/restarts/sum", 0.0))
                if report.index == 4:
                    asyncio.get_running_loop().call_later(0.05, os.kill, pid_of("trainer-1"), signal.SIGKILL)
            await run.finish()
            return restarts, run.account().is_closed, run.trainer.version

    restarts, closed, version = asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    assert len(restarts) == 8
    assert sum(restarts) == 1
    assert version == 8
    assert closed


def test_a_run_without_restarts_ends_with_its_engine_and_the_cause(model: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with make_run(model, tmp_path, processes=1, engine_restarts=0) as run:
            async for report in run.steps(1000):
                if report.index == 2:
                    os.kill(pid_of("engine-0"), signal.SIGKILL)

    with pytest.raises((RunAborted, ChildDied), match="signal 9"):
        asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    assert not [pid for pid in descendants(os.getpid()) if any(str(tmp_path) in link for link in open_files(pid))]


def test_a_killed_engine_comes_back_and_costs_no_token(model: Path, tmp_path: Path) -> None:
    async def main() -> tuple[dict[str, list[str]], int, float, bool]:
        killed: list[int] = []
        run = make_run(model, tmp_path, TransformersEngine(model, name="first"), TransformersEngine(model, name="second"), processes=1)
        served: dict[str, list[str]] = {"with one": [], "back": []}
        restarts, at = 0.0, 0
        async with run:
            async for report in run.steps(400):
                restarts += report.metrics.get("weights/engine_restarts/sum", 0.0)
                staleness.append(report.metrics["staleness/token/max"])
                if report.index == 2:
                    killed.append(pid_of("first"))
                    os.kill(killed[0], signal.SIGKILL)
                serving = list(run.router.serving)
                if serving == ["second"]:
                    served["with one"] = serving
                elif served["with one"] and serving == ["first", "second"]:
                    served["back"] = serving
                    at = at or report.index
                if at and report.index >= at + 3:
                    break
            health = await run.engines[0].health()
            assert pid_of("first") != killed[0]
            await run.finish()
            return served, run.trainer.version - health.version, restarts, run.account().is_closed

    staleness: list[float] = []
    served, behind, restarts, closed = asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    assert served == {"with one": ["second"], "back": ["first", "second"]}
    assert behind <= 2
    assert restarts == 1
    assert max(staleness) <= 2
    assert closed


def test_an_engine_that_comes_late_serves_with_the_newest_version(model: Path, tmp_path: Path) -> None:
    async def main() -> int:
        late = TransformersEngine(model, name="late")
        async with make_run(model, tmp_path, processes=1) as run:
            async for report in run.steps(400):
                if report.index == 2:
                    await run.add_engine(late)
                    assert "late" not in run.router.serving
                elif "late" in run.router.serving:
                    return (await late.health()).version
        return -1

    assert asyncio.run(asyncio.wait_for(main(), LIMIT_S)) >= 2


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM], ids=["kill -9", "ctrl-c", "sigterm"])
def test_no_process_outlives_its_controller(model: Path, tmp_path: Path, signum: signal.Signals) -> None:
    command = [sys.executable, str(Path(__file__).with_name("controller.py")), str(model), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
                          env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}) as controller:
        try:
            assert controller.stdout is not None
            lines = iter(controller.stdout.readline, "")
            assert any(line.strip() == "2" for line in lines), "the run never made two steps"
            family = descendants(controller.pid)
            assert len(family) >= 4, "engine, trainer, zygote and reward worker"
            controller.send_signal(signum)
            assert gone_within(family, 5.0)
        finally:
            controller.kill()
