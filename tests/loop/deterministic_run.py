"""A run for tests: prints a line a step with what was trained on, what was measured and what the weights are, to the bit.

Rewards come late, by as much as chance has it, so that groups finish, and are refilled, in another order every time.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import sys
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.buffer.replay_buffer import ReplayBuffer
from asyncrl.loop import Run
from asyncrl.rollout.env import SingleTurn
from asyncrl.rollout.eval_set import EvalSet
from asyncrl.rollout.inline_engine import InlineEngine
from asyncrl.rollout.prompts import PromptSource
from asyncrl.rollout.task_config import ProbeConfig
from asyncrl.run_options import RunOptions
from asyncrl.train.trainer import Trainer
from asyncrl.types import Batch, Prompt, Sampling
from asyncrl.weights.config import WeightsConfig
from tests.timeless import timeless


def late_reward(prompt: Prompt, completion: str) -> float:
    """One of two rewards, so that groups are dropped for equal ones; neither is exact in binary, so that sums depend on their order."""
    time.sleep(random.SystemRandom().random() * 0.02)
    return 0.1 if zlib.crc32(f"{prompt.prompt_id} {completion}".encode()) % 4 else 0.7


def digest(batch: Batch) -> str:
    """Of everything a batch holds, in order, but its times."""
    parts: list[Any] = [batch.version]
    for group in batch.groups:
        parts += [group.group_id, group.prompt.prompt_id, group.prompt.tokens]
        for rollout in group.rollouts:
            parts += [rollout.index, rollout.status.value, sorted(rollout.rewards.items())]
            for sequence in rollout.sequences:
                parts += [sequence.tokens.tobytes(), sequence.rollout_logprobs.tobytes(), sequence.loss_mask.tobytes(), sequence.spans]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def bits(metrics: Mapping[str, float]) -> str:
    """Those that are no times, with every bit."""
    return json.dumps({name: float(value).hex() for name, value in timeless(metrics).items()}, sort_keys=True)


async def main(model: str, folder: str, settings: dict[str, Any]) -> None:
    buffer = ReplayBuffer(groups_per_step=3, group_size=4, max_empty_fills=100, **settings["buffer"])
    prompts = [Prompt(text=f"{number}+{number % 7}=" + "1" * (number % 5)) for number in range(40)]
    run = Run(prompts=PromptSource(prompts), engine=InlineEngine(model), env=SingleTurn(late_reward, workers=3),
              sampling=Sampling(max_new_tokens=12), buffer=buffer,
              trainer=Trainer(model, correction="token_tis", learning_rate=1e-2, processes=settings["processes"]),
              options=RunOptions(name="run", folder=folder, seed=settings["seed"], deterministic=True,
                                 eval_sets=(EvalSet("sums", (Prompt(text="1+1="), Prompt(text="12+3="))),),
                                 probe=ProbeConfig(every_steps=2), weights=WeightsConfig(dtype="float32", interruption="drain")))
    async with run:
        async for report in run.steps(settings["steps"]):
            evaluation = await run.evaluate()
            state_hash = (await run.trainer.publish()).state_hash
            print(report.index, digest(report.batch), bits(report.metrics), bits(evaluation.metrics), f"{state_hash:016x}")
        dropped = run.account().dropped
        await run.trainer.export(Path(folder) / "model")
    print("dropped", sorted(dropped.items()))
    print("model", hashlib.sha256((Path(folder) / "model" / "model.safetensors").read_bytes()).hexdigest())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])))
