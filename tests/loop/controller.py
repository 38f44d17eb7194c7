"""A controller for tests: a real asynchronous run that prints a line a step until it is ended from outside."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from asyncrl import PromptSource, ReplayBuffer, Run, RunOptions, Sampling, SingleTurn, Trainer, TransformersEngine
from asyncrl.types import Prompt
from asyncrl.weights.config import WeightsConfig


def reward(prompt: Prompt, completion: str) -> float:
    return len(set(completion)) / 8.0


async def main(model: str, folder: str) -> None:
    prompts = [Prompt(text=f"{number}+{number}=") for number in range(10)]
    run = Run(prompts=PromptSource(prompts), engine=TransformersEngine(model), env=SingleTurn(reward), sampling=Sampling(max_new_tokens=8),
              buffer=ReplayBuffer(groups_per_step=4, group_size=4, max_staleness=2),
              trainer=Trainer(model, correction="token_tis", learning_rate=1e-3, processes=1),
              options=RunOptions(name="controller", folder=Path(folder), weights=WeightsConfig(dtype="float32")))
    async with run:
        async for step in run.steps(100_000):
            print(step.index, flush=True)


asyncio.run(main(*sys.argv[1:]))
