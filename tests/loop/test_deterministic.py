"""`deterministic`: two runs of one configuration are the same to the bit, whatever the time does; what cannot promise that is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.buffer.replay_buffer import ReplayBuffer
from asyncrl.errors import ConfigError
from asyncrl.loop import Run
from asyncrl.rollout.env import SingleTurn
from asyncrl.rollout.fake_engine import FakeEngine
from asyncrl.rollout.prompts import PromptSource
from asyncrl.run_options import RunOptions
from asyncrl.train.trainer import Trainer
from asyncrl.types import Prompt, Sampling
from asyncrl.weights.config import WeightsConfig
from tests.tiny_model import make_tiny_model

HERE = Path(__file__).parent
ON_POLICY: dict[str, Any] = {"max_staleness": 0}
LAG = {"max_staleness": 2, "policy": {"kind": "fixed_lag", "lag_steps": 2}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough for the number of rows of a product to change its last bits."""
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=128, layers=3)


def lines(model: Path, folder: Path, *, hash_seed: int, **settings: Any) -> list[str]:
    """What a run in a process of its own prints."""
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, str(HERE / "deterministic_run.py"), str(model), str(folder), json.dumps({"steps": 4} | settings)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_two_runs_on_policy_are_bit_equal_and_another_seed_gives_another(model: Path, tmp_path: Path) -> None:
    first, second, other = (lines(model, tmp_path / f"{hash_seed}-{seed}", hash_seed=hash_seed, seed=seed, buffer=ON_POLICY, processes=0)
                            for hash_seed, seed in ((1, 0), (2, 0), (1, 5)))
    assert len(first) == 6
    assert "zero_variance" in first[-2], "no group was refilled: the order in which groups end was not tried"
    assert first == second
    assert all(one != another for one, another in zip(first, other, strict=True))


@pytest.mark.slow
def test_two_runs_with_a_lag_and_two_ranks_are_bit_equal(model: Path, tmp_path: Path) -> None:
    first, second = (lines(model, tmp_path / str(hash_seed), hash_seed=hash_seed, seed=0, buffer=LAG, processes=2) for hash_seed in (1, 2))
    assert "zero_variance" in first[-2]
    assert first == second


def one(prompt: Prompt, completion: str) -> float:
    return 1.0


def unreproducible() -> FakeEngine:
    engine = FakeEngine()
    engine.capabilities = dataclasses.replace(engine.capabilities, bit_reproducible=False)
    return engine


@pytest.mark.parametrize(("engines", "buffer", "field"), [
    ([unreproducible()], ON_POLICY, "run.deterministic, engine.kind"),
    ([FakeEngine(name="a"), FakeEngine(name="b")], LAG, "run.deterministic, engine.kind"),
    ([FakeEngine()], {"max_staleness": 2}, "run.deterministic, buffer.policy.kind, buffer.max_staleness"),
], ids=["an engine that is not reproducible", "two engines", "a bound above 0"])
def test_parts_that_cannot_be_deterministic_are_refused(model: Path, engines: list[FakeEngine], buffer: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        Run(prompts=PromptSource([Prompt(text="1+1=")]), engine=engines, env=SingleTurn(one), sampling=Sampling(),
            buffer=ReplayBuffer(groups_per_step=1, group_size=2, **buffer),
            trainer=Trainer(model, correction="token_tis", learning_rate=1e-3, processes=0),
            options=RunOptions(deterministic=True, weights=WeightsConfig(interruption="drain")))
