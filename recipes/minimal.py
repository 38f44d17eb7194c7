"""The smallest asynchronous run, as a script: `.venv/bin/python recipes/minimal.py [MODEL [STEPS]]`, after `make demo`."""

import asyncio
import sys

from arithmetic.task import is_correct, sums

import asyncrl


async def main(model: str = "runs/quickstart/model", steps: str = "200") -> None:
    """Train `model` on sums, print the reward of each step, and leave the result in `runs/run/model`."""
    run = asyncrl.Run(
        prompts=asyncrl.PromptSource(sums(seed=0)),
        engine=asyncrl.TransformersEngine(model),
        env=asyncrl.SingleTurn(reward=is_correct),
        sampling=asyncrl.Sampling(temperature=1.0, max_new_tokens=4),
        buffer=asyncrl.ReplayBuffer(groups_per_step=32, group_size=16, max_staleness=2),
        trainer=asyncrl.Trainer(model, advantages="grpo", correction="token_tis", loss="decoupled_ppo", learning_rate=5e-4, processes=1),
    )
    async with run:
        async for step in run.steps(int(steps)):
            print(step.index, step["reward/total/mean"], step["staleness/token/max"], flush=True)
        await run.trainer.export(run.paths.root / "model")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
