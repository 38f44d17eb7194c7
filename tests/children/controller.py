"""A controller for tests: starts a child, a zygote, its worker and what a reward starts, prints their ids, and waits to be killed."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from children.sessions import in_a_session_of_its_own

from asyncrl.child import Child
from asyncrl.rollout.reward import RewardPool
from asyncrl.types import Prompt


def processes(prompt: Prompt, completion: str) -> float:
    if completion == "session":
        return float(in_a_session_of_its_own())
    return float(os.getppid() if completion == "zygote" else os.getpid())


async def main(logs: Path) -> None:
    pool = RewardPool([processes], workers=1)
    pool.start(logs)
    child = await Child.start("children.echo", name="echo", spec={}, logs=logs)
    scores = [await pool.score(Prompt(), which, []) for which in ("zygote", "worker", "session")]
    print(json.dumps([child.pid, *(int(score["processes"]) for score in scores)]), flush=True)
    await child.wait_exit()


asyncio.run(main(Path(sys.argv[1])))
