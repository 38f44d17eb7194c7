"""A whole run of PPO: engine, buffer, critic and reference, in one process, ended in the middle and resumed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from asyncrl.buffer.replay_buffer import ReplayBuffer
from asyncrl.loop import Run
from asyncrl.rollout.env import SingleTurn
from asyncrl.rollout.inline_engine import InlineEngine
from asyncrl.rollout.prompts import PromptSource
from asyncrl.run_options import RunOptions
from asyncrl.step_report import StepReport
from asyncrl.train.model import load_policy
from asyncrl.train.trainer import Trainer
from asyncrl.types import Prompt, Sampling
from asyncrl.weights.config import WeightsConfig
from tests.tiny_model import make_tiny_model

STEPS, HALF, TOKENS = 12, 6, 6
GAE = {"kind": "gae", "critic": {"learning_rate": 1e-2, "epochs": 2}}


def share_of_fives(prompt: Prompt, completion: str) -> float:
    return completion.count("5") / TOKENS


async def run_half(model: Path, folder: Path, *, resume: bool) -> tuple[list[StepReport], Trainer]:
    trainer = Trainer(model, advantages=GAE, correction="token_tis", reference={"kind": "in_reward", "coefficient": 1e-3},
                      learning_rate=3e-3, epochs=2, processes=0, checkpoint_every_steps=HALF)
    run = Run(prompts=PromptSource([Prompt(text=f"{a}+1=") for a in range(9)]), engine=InlineEngine(model), env=SingleTurn(share_of_fives),
              sampling=Sampling(max_new_tokens=TOKENS), trainer=trainer,
              buffer=ReplayBuffer(groups_per_step=24, group_size=1, max_staleness=1, zero_variance="keep"),
              options=RunOptions(name="ppo", folder=folder, weights=WeightsConfig(dtype="float32"), resume="newest" if resume else None))
    async with run:
        return [report async for report in run.steps(HALF)], trainer


@pytest.mark.slow
def test_a_run_with_groups_of_one_improves_across_a_resume(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    first, _ = asyncio.run(run_half(model, tmp_path, resume=False))
    second, trainer = asyncio.run(run_half(model, tmp_path, resume=True))
    assert [report.index for report in (*first, *second)] == list(range(1, STEPS + 1))
    rewards = [report["reward/total/mean"] for report in (*first, *second)]
    assert rewards[0] < 0.2
    assert min(rewards[-3:]) > 0.6
    assert first[0]["reference/kl_k3/mean"] == 0.0
    assert all(report["reference/kl_k3/mean"] > 0.0 for report in (*first[1:], *second))
    assert all("critic/value_loss/mean" in report.metrics for report in (*first, *second))
    trainee = trainer._ranks._rank._trainee
    assert trainee.critic.optimizer.updates == 2 * STEPS
    initial = dict(load_policy(model).named_parameters())
    assert all(torch.equal(parameter, initial[name]) for name, parameter in trainee.reference.policy.named_parameters())
