"""The waterfall of real runs: it closes, and what is put in the way of a run moves the bar it should."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import zlib
from pathlib import Path

import pytest

from asyncrl.buffer.replay_buffer import ReplayBuffer
from asyncrl.loop import Run
from asyncrl.observe.waterfall import Waterfall, text_of_waterfall, waterfall_of, write_waterfall
from asyncrl.rollout.env import SingleTurn
from asyncrl.rollout.prompts import PromptSource
from asyncrl.rollout.transformers_engine import TransformersEngine
from asyncrl.run_options import RunOptions
from asyncrl.train.trainer import Trainer
from asyncrl.types import Prompt, Sampling
from asyncrl.weights.config import WeightsConfig
from tests.tiny_model import make_tiny_model

LIMIT_S, SLOW_S = 60, 0.15


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def quick(prompt: Prompt, completion: str) -> float:
    return zlib.crc32(f"{prompt.prompt_id} {completion}".encode()) % 97 / 97.0


def slow(prompt: Prompt, completion: str) -> float:
    time.sleep(SLOW_S)
    return quick(prompt, completion)


class SlowSync(TransformersEngine):
    """Its weights take long to write."""

    async def apply(self, manifest):
        ack = await super().apply(manifest)
        await asyncio.sleep(SLOW_S)
        return ack


def measured(model: Path, folder: Path, *, reward: object = quick, engine: type[TransformersEngine] = TransformersEngine,
             max_new_tokens: int = 8) -> tuple[Waterfall, float]:
    """The waterfall of four steps, and the seconds they took by a clock of our own."""
    run = Run(prompts=PromptSource([Prompt(text=f"{number}+1=") for number in range(10)]), engine=engine(model), env=SingleTurn(reward),
              sampling=Sampling(max_new_tokens=max_new_tokens),
              buffer=ReplayBuffer(groups_per_step=4, group_size=4, max_staleness=0, zero_variance="keep"),
              trainer=Trainer(model, correction="token_tis", learning_rate=1e-3, processes=1),
              options=RunOptions(name="run", folder=folder, weights=WeightsConfig(dtype="float32")))

    async def main() -> tuple[list[dict[str, float]], float]:
        async with run:
            began_s = time.monotonic()
            reports = [report async for report in run.steps(4)]
            return [{"trainer_step": report.index, **report.metrics} for report in reports], time.monotonic() - began_s
    rows, seconds = asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    found = waterfall_of(rows)
    assert found is not None
    return found, seconds


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Waterfall, float]:
    return measured(model, tmp_path_factory.mktemp("plain"))


def test_every_second_has_one_cause(plain: tuple[Waterfall, float]) -> None:
    found, seconds = plain
    assert sum(found.engine.values()) == pytest.approx(1.0, abs=0.01)
    assert sum(found.trainer.values()) == pytest.approx(1.0, abs=0.01)
    assert found.engine_s == pytest.approx(seconds, rel=0.01, abs=0.01)
    assert found.trainer_s == pytest.approx(seconds, rel=0.01, abs=0.01)
    assert all(share >= 0.0 for share in itertools.chain(found.engine.values(), found.trainer.values()))
    assert all(found.engine[cause] > 0.0 for cause in ("decode", "prefill", "idle", "paused"))
    assert all(found.trainer[cause] > 0.0 for cause in ("forward", "backward", "optimizer", "data", "sync", "other"))
    assert found.mfu is not None
    assert 0.0 < found.mfu < found.mfu_computing < 1.0


def test_a_slow_reward_leaves_engines_idle_and_the_trainer_without_data(model: Path, tmp_path: Path) -> None:
    found, _ = measured(model, tmp_path, reward=slow)
    # on policy, each of four steps ends with a reward for which both wait
    assert found.engine["idle"] * found.engine_s >= 4 * SLOW_S
    assert found.trainer["data"] * found.trainer_s >= 4 * SLOW_S


def test_a_slow_sync_shows_as_engines_that_stand_still(model: Path, tmp_path: Path, plain: tuple[Waterfall, float]) -> None:
    found, _ = measured(model, tmp_path, engine=SlowSync)
    # the update after the last step is in no step
    assert found.engine["paused"] * found.engine_s >= 3 * SLOW_S
    assert plain[0].engine["paused"] * plain[0].engine_s < 3 * SLOW_S


def test_a_long_tail_shows_as_tail(model: Path, tmp_path: Path, plain: tuple[Waterfall, float]) -> None:
    found, _ = measured(model, tmp_path, max_new_tokens=200)
    assert found.engine["tail"] > plain[0].engine["tail"] + 0.1


def row(step: int, *, data_s: float = 1.0) -> dict[str, float]:
    engine = {f"engine/{cause}_s/sum": value for cause, value in
              {"decode": 4.0, "prefill": 1.0, "tail": 2.0, "idle": 3.0, "whole": 10.0}.items()}
    trainer = {f"trainer/{cause}_s/sum": value for cause, value in
               {"forward": 2.0, "backward": 4.0, "optimizer": 2.0, "data": data_s, "evaluation": 0.5, "other": 0.5,
                "whole": 9.0 + data_s}.items()}
    return {"trainer_step": step, **engine, **trainer, "train/flop/sum": 4e9, "train/peak_flop_s/last": 1e9}


def test_shares_are_of_all_steps_together_and_mfu_of_all_seconds() -> None:
    found = waterfall_of([{"trainer_step": 0}, {"eval_version": 0}, row(1), row(2, data_s=11.0)])
    assert found is not None
    assert (found.steps, found.seconds, found.engine_s) == (2, 30.0, 20.0)
    assert (found.engine["decode"], found.trainer["data"]) == (0.4, 0.4)
    assert found.step_s == pytest.approx(14.5)
    assert (found.mfu, found.mfu_computing) == (pytest.approx(8 / 30), pytest.approx(0.5))
    assert waterfall_of([{"trainer_step": 1}]) is None


def test_it_is_written_into_the_folder_and_told(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    assert write_waterfall(tmp_path, title="run") is None
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row(step)) + "\n" for step in (1, 2)))
    found = write_waterfall(tmp_path, title="run")
    assert found is not None
    assert json.loads((tmp_path / "waterfall.json").read_text())["engine"]["decode"] == 0.4
    assert (tmp_path / "waterfall.png").read_bytes().startswith(b"\x89PNG")
    text = text_of_waterfall(found)
    assert "decode       40.0%  ████████████████  " in text
    assert "MFU of the trainer 40.0%, while it computes 50.0%, of 1 GFLOP/s" in text
