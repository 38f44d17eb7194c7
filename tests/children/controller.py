"""A controller for tests: starts a child, a zygote and its workers, prints their process ids, and waits to be killed."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from asyncrl.child import Child
from asyncrl.rollout.reward import RewardPool
from asyncrl.types import Prompt


def processes(prompt: Prompt, completion: str) -> float:
    return float(os.getppid() if completion == "zygote" else os.getpid())


async def main(logs: Path) -> None:
    pool = RewardPool([processes], workers=1)
    pool.start(logs)
    child = await Child.start("children.echo", name="echo", spec={}, logs=logs)
    scores = [await pool.score(Prompt(), which, []) for which in ("zygote", "worker")]
    print(json.dumps([child.pid, *(int(score["processes"]) for score in scores)]), flush=True)
    await child.wait_exit()


asyncio.run(main(Path(sys.argv[1])))
