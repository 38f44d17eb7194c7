"""What the settings of colocation lead to, without starting a process."""

from __future__ import annotations

import asyncio
from typing import Any

from asyncrl import training
from asyncrl.config import RunConfig
from asyncrl.rollout import env
from tests.config_observers import Scene


def turns(config: RunConfig, scene: Scene) -> object:
    """What engine and trainer are told when the turn passes."""
    scene.patch.setattr(env, "RewardPool", lambda functions, **settings: None)
    run = training.build(config, model=scene.model)
    story: list[str] = []

    async def told(what: str) -> Any:
        story.append(what)
        return {} if what == "sleep" else 0

    async def main() -> None:
        run.weights._applied = run.weights._published
        run.router.sleep = lambda: told("sleep")  # type: ignore[method-assign]
        for name in ("publish", "offload", "onload"):
            setattr(run.trainer, name, lambda name=name: told(name))
        await run.turns.to_trainer()
        await run.turns.to_engines()

    asyncio.run(main())
    return story
