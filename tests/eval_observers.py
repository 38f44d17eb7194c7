"""What the `eval` section of a configuration leads to, observed without starting a process."""

from __future__ import annotations

import asyncio
import os
import zlib
from pathlib import Path
from types import SimpleNamespace

from asyncrl import run_folder, task
from asyncrl.clock import run_virtual
from asyncrl.config import RunConfig
from asyncrl.observe.console import Console
from asyncrl.observe.plain import PlainFace
from asyncrl.observer import AsideRollouts, Observer
from asyncrl.rollout.env import Outcome, Session
from asyncrl.rollout.evaluation import Evaluation, SetResult
from asyncrl.rollout.fake_engine import FakeEngine
from asyncrl.tokenizer import Tokenizer
from asyncrl.types import Prompt
from tests.config_observers import Scene
from tests.rollout.rollout_fakes import FunctionEnv, requests_of, router_of


def evaluated(config: RunConfig, scene: Scene) -> object:
    """What an evaluation of a scripted engine measures, and how its requests were to be sampled."""
    async def run(prompt: Prompt, session: Session) -> Outcome:
        turn = await session.generate(prompt.tokens)
        return Outcome(turn.finish, {"reward": zlib.crc32(f"{prompt.text} {session.key}".encode()) % 4 / 4})

    async def main() -> object:
        engine = FakeEngine()
        aside = AsideRollouts(await router_of(engine), FunctionEnv(run), config.sampling.build(), 0, 60.0)
        sets = [asked.completed(Tokenizer(scene.model)) for asked in task.build_eval_sets(config)]
        weights = SimpleNamespace(applied=lambda: asyncio.sleep(0, result=0))
        observer = Observer(aside, sets=sets, probed=(), probe=config.run.probe, weights=weights, trainer=None)
        return (await observer.evaluate()).metrics, [(request.tokens.tolist(), request.sampling) for request in requests_of(engine)]

    return run_virtual(main())


def kept(config: RunConfig, scene: Scene) -> object:
    """Steps whose weights were the best so far, when the rewards of set after set fall and rise."""
    exported: list[object] = []

    async def export(place: Path) -> None:
        os.mkdir(place)
        exported.append(step)

    def result(reward: float) -> SetResult:
        return SetResult({"reward/mean": reward, "pass_at_1/mean": reward ** 2 - reward}, 1, 0, frozenset({0}))

    scene.patch.chdir(scene.folder)
    written = run_folder.RunFolder(config, console=Console(PlainFace(lambda line: None)))
    for step, reward in enumerate((0.4, 0.3, 0.6)):
        sets = dict(zip(config.eval.sets, map(result, (reward, 1 - reward)), strict=False))
        asyncio.run(written.evaluated(step, Evaluation(sets, version=step), export=export))
    written.close()
    return exported
