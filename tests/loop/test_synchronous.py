"""K = 0 with everything in one process is exactly on-policy, and the same to the bit as a loop anyone would write by hand."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import numpy as np

from asyncrl.buffer.replay_buffer import ReplayBuffer
from asyncrl.loop import Run
from asyncrl.paths import RunPaths
from asyncrl.rollout.engine import GenerationRequest, Interruption
from asyncrl.rollout.env import SingleTurn
from asyncrl.rollout.inline_engine import InlineEngine
from asyncrl.rollout.prompts import PromptSource
from asyncrl.rollout.seeds import derive_seed
from asyncrl.rollout.task_config import ProbeConfig
from asyncrl.run_options import RunOptions
from asyncrl.step_report import StepReport
from asyncrl.train.trainer import Trainer
from asyncrl.types import Batch, Prompt, Rollout, RolloutGroup, Sampling, SequenceBuilder, Status
from asyncrl.weights.config import WeightsConfig
from tests.tiny_model import make_tiny_model

STEPS, GROUPS, GROUP_SIZE, SEED = 20, 3, 4, 7
SAMPLING = Sampling(temperature=1.3, max_new_tokens=6)
WEIGHTS = WeightsConfig(dtype="float32", interruption="drain")
TRAINING = {"advantages": "rloo", "correction": "token_tis", "loss": "decoupled_ppo", "learning_rate": 3e-3, "processes": 0}


def prompts() -> list[Prompt]:
    return [Prompt(text=f"{a}+{b}=") for a, b in itertools.product(range(5), range(5))]


def reward(prompt: Prompt, completion: str) -> float:
    """Dense, so that no group has equal rewards by chance for long."""
    return sum((index + 1) * (ord(character) % 7) for index, character in enumerate(completion)) / 10.0


async def run_asynchronously(model: Path, folder: Path) -> tuple[list[StepReport], int]:
    run = Run(prompts=PromptSource(prompts()), engine=InlineEngine(model), env=SingleTurn(reward), sampling=SAMPLING,
              buffer=ReplayBuffer(groups_per_step=GROUPS, group_size=GROUP_SIZE, max_staleness=0, zero_variance="keep"),
              trainer=Trainer(model, **TRAINING),
              options=RunOptions(name="async", folder=folder, seed=SEED, weights=WEIGHTS,
                                 probe=ProbeConfig(every_steps=1, max_mean_gap=1e-4)))
    async with run:
        reports = [report async for report in run.steps(STEPS)]
        return reports, (await run.trainer.publish()).state_hash


async def run_by_hand(model: Path, folder: Path) -> tuple[list[float], int]:
    """Generate, judge, train, publish, apply: one after the other, nothing between them."""
    paths = RunPaths(root=folder / "plain", shared=folder / "plain-shared")
    paths.make()
    engine, trainer, stream = InlineEngine(model), Trainer(model, **TRAINING), PromptSource(prompts()).stream(_tokenizer(model))
    await trainer.start(paths, weights=WEIGHTS)
    await engine.start(paths)
    await _sync(engine, trainer)
    means, numbers = [], itertools.count()
    for version in range(STEPS):
        chosen = [(next(numbers), prompt) for prompt in itertools.islice(stream, GROUPS)]
        rollouts = await asyncio.gather(*(_roll_out(engine, model, prompt, group, index)
                                          for group, prompt in chosen for index in range(GROUP_SIZE)))
        means.append(float(np.mean([rollout.reward for rollout in rollouts])))
        groups = tuple(RolloutGroup(group, prompt, tuple(r for r in rollouts if r.group_id == group)) for group, prompt in chosen)
        await trainer.step(Batch(version=version, groups=groups))
        await _sync(engine, trainer)
    state_hash = (await trainer.publish()).state_hash
    await engine.close()
    await trainer.close()
    return means, state_hash


def _tokenizer(model: Path):
    from asyncrl.tokenizer import Tokenizer

    return Tokenizer(model)


async def _sync(engine: InlineEngine, trainer: Trainer) -> None:
    manifest = await trainer.publish()
    await engine.pause(Interruption.DRAIN)
    await engine.apply(manifest)
    await engine.resume()


async def _roll_out(engine: InlineEngine, model: Path, prompt: Prompt, group: int, index: int) -> Rollout:
    builder = SequenceBuilder(prompt.tokens)
    request = GenerationRequest(request_id=f"{group}/{index}", tokens=builder.tokens, sampling=SAMPLING,
                                seed=derive_seed(derive_seed(SEED, group, index), 0))
    status = Status.LENGTH
    async for chunk in engine.generate(request):
        builder.sampled(chunk.tokens, logprobs=chunk.logprobs, policy_version=chunk.policy_version, kv_fresh=chunk.kv_fresh, turn=0)
        status = chunk.finish or status
    sequence = builder.build()
    text = _tokenizer(model).decode(sequence.tokens[len(prompt.tokens):])
    return Rollout(prompt_id=prompt.prompt_id, group_id=group, index=index, sequences=(sequence,), status=status,
                   rewards={"reward": reward(prompt, text)}, sampling=SAMPLING)


def test_zero_staleness_is_on_policy_and_equals_a_plain_loop_bit_for_bit(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    reports, state_hash = asyncio.run(run_asynchronously(model, tmp_path))
    plain_means, plain_hash = asyncio.run(run_by_hand(model, tmp_path))

    rows = [report.metrics for report in reports]
    assert len(rows) == STEPS
    assert [row["staleness/token/max"] for row in rows] == [0.0] * STEPS
    assert all(row["correction/update_ratio/max"] == 1.0 == row["correction/update_ratio/min"] for row in rows)
    assert max(row["correction/logprob_gap/max"] for row in rows) < 1e-4
    assert [float(np.mean([rollout.reward for rollout in report.batch.rollouts])) for report in reports] == plain_means
    assert state_hash == plain_hash
    assert len(set(plain_means)) > STEPS // 2
