"""The main job: from a configuration to a folder with a trained model, its metrics and a summary."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import MappingProxyType
from typing import Any

from asyncrl.buffer.replay_buffer import ReplayBuffer
from asyncrl.child import Child
from asyncrl.config import RunConfig
from asyncrl.errors import AsyncRLError, RunAborted, RunStopped
from asyncrl.loop import Run
from asyncrl.observe.console import Console
from asyncrl.rollout.config import InlineEngineConfig, TransformersEngineConfig
from asyncrl.rollout.engine import Engine
from asyncrl.rollout.eval_set import sources_of
from asyncrl.rollout.evaluation import Evaluation
from asyncrl.rollout.inline_engine import InlineEngine
from asyncrl.rollout.seeds import derive_seed
from asyncrl.rollout.task_config import SetsEval
from asyncrl.rollout.transformers_engine import TransformersEngine
from asyncrl.rollout.vllm_engine import VLLMEngine
from asyncrl.run_folder import RunFolder
from asyncrl.run_options import RunOptions
from asyncrl.run_state import Resume, RunState
from asyncrl.settings import SEEDS
from asyncrl.task import build_env, build_eval_sets, build_prompts, build_sampling, reward_workers
from asyncrl.train.prepare import building_folder, cache_key
from asyncrl.train.prepare_config import CrossEntropyWarmUp, ModelFolder
from asyncrl.train.sft_config import SFTConfig
from asyncrl.train.trainer import Trainer

_PREPARE_TIMEOUT_S = 3600.0
_STEP_GRACE_S = 120.0
"""How long an interrupted run waits for its step: longer, and the newest checkpoint is what is left."""
_BELOW = MappingProxyType({"vllm": " with vLLM's core in a process below it"})


async def train(config: RunConfig, *, console: Console, resume: Resume = None) -> dict[str, Any]:
    """Prepare the model, run `run.steps` steps, write everything under `run.folder/run.name`. Returns the summary.

    Cancelled, it finishes the step under way and saves before it goes. A run that fails or is interrupted leaves its summary and
    picture too; the summary then says why under `ended_early`.
    """
    folder = RunFolder(config, console=console, resume=resume)
    try:
        model = await prepare_model(config, logs=folder.path / "logs", echo=console.note)
        console.note(f"engine, trainer and reward workers start; what they write is in {folder.path / 'logs'}")
        async with build(config, model=model, resumed=folder.resumed) as run:
            run.notes |= folder.notes
            folder.track()
            try:
                await _finishing_the_step(run, _train_to_the_end(run, config, folder))
                for line in run.prompts.passed_over():
                    console.note(line)
                await run.finish()
                run.account()
            except BaseException as failure:
                gone = [place for place in (folder.path, run.paths.shared) if not place.is_dir()]
                if gone and isinstance(failure, Exception):
                    failure = RunAborted(f"{gone[0]} was removed while the run went on: {failure}")
                folder.ends_early(failure)
                raise failure
            finally:
                await run.finish()
                summary = folder.summarise(run.ledger.account(buffered=run.buffer.held(), in_flight=run.worker.in_flight()))
            return summary
    finally:
        folder.close()


async def _finishing_the_step(run: Run, stepping: Coroutine[Any, Any, None]) -> None:
    """Run `stepping`, and write a checkpoint if it ends before its end.

    Cancelled, the step under way is finished first, unless it takes too long. Of a failure beside the steps, in rollouts, data or
    engines, the trainer does not know: what it has trained need not be trained again.
    """
    task = asyncio.ensure_future(stepping)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        run.stop()
        await asyncio.wait({task}, timeout=_STEP_GRACE_S)
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise
        try:
            task.result()
        except RunStopped:
            await run.save()
        raise
    except AsyncRLError as failure:
        if run.index and run.is_between_steps:
            try:
                await run.save()
            except AsyncRLError as error:
                failure.add_note(f"nor can it be saved, {type(error).__name__}: {error}")
        raise


async def _train_to_the_end(run: Run, config: RunConfig, folder: RunFolder) -> None:
    await _train_steps(run, config, folder)
    await run.save()
    await run.trainer.export(folder.path / "model")


async def _train_steps(run: Run, config: RunConfig, folder: RunFolder) -> None:
    every = config.eval.every_steps if isinstance(config.eval, SetsEval) else 0
    folder.resume_best(run.trainer.version)
    if every and run.index % every == 0 and not folder.was_evaluated(run.index):
        (await _evaluate(run, folder)).require_scored()
    folder.begin()
    async for report in run.steps(config.run.steps - run.index):
        folder.stepped(report, decode=run.tokenizer.decode)
        if every and report.index % every == 0:
            await _evaluate(run, folder)
    if run.index < config.run.steps:
        folder.data_ended(run.index)
        _require_a_step(run)
    if every and not folder.was_evaluated(run.index):
        await run.weights.publish()
        await _evaluate(run, folder)
    folder.end()


def _require_a_step(run: Run) -> None:
    """Raise RunAborted where all the data made no batch: there is no trained model to leave."""
    if run.index == 0:
        dropped = ", ".join(f"{count.rollouts} rollouts {reason}" for reason, count in run.account().dropped.items()) or "nothing was asked"
        raise RunAborted(f"the prompts ended before the first step: of {run.prompts.cursor} that were asked no batch of "
                         f"{run.buffer.config.groups_per_step} groups was left ({dropped})")


async def _evaluate(run: Run, folder: RunFolder) -> Evaluation:
    evaluation = await run.evaluate()
    assert evaluation.version == run.trainer.version, "best/ would hold other weights than those that answered"
    await folder.evaluated(run.index, evaluation, export=run.export)
    return evaluation


async def prepare_model(config: RunConfig | SFTConfig, *, logs: Path, echo: Callable[[str], None]) -> Path:
    """The folder training starts from: made, warmed up and cached in a child, so that nothing of it stays in this process."""
    if isinstance(config.model, ModelFolder) and not isinstance(config.warm_up, CrossEntropyWarmUp):
        return Path(config.model.path)
    folder = Path(config.run.folder) / ".cache" / cache_key(config.model, config.warm_up)
    if folder.is_dir():
        echo(f"model: prepared before, {folder}")
    else:
        echo("model: preparing (warm-up, cached afterwards)")
        folder.parent.mkdir(parents=True, exist_ok=True)
        spec = {"model": config.model.model_dump(), "warm_up": config.warm_up.model_dump(), "folder": str(folder)}
        began_s = time.monotonic()
        child = await Child.start("asyncrl.train.prepare", name="prepare", spec=spec, logs=logs)
        try:
            async with asyncio.timeout(_PREPARE_TIMEOUT_S):
                async for reply in child.stream("prepare"):
                    if told := reply.body.get("told"):
                        echo(told)
        except TimeoutError:
            raise TimeoutError(f"child 'prepare' did not answer 'prepare' within {_PREPARE_TIMEOUT_S:g} s") from None
        finally:
            try:
                await child.close()
            finally:
                shutil.rmtree(building_folder(folder, pid=child.pid), ignore_errors=True)
        echo(f"model: prepared in {time.monotonic() - began_s:.0f} s, {folder}")
    return folder


def build(config: RunConfig, *, model: Path, resumed: RunState | None = None) -> Run:
    """The run a configuration describes, from `model` on, or from the checkpoint that `resumed` was saved with; starts nothing."""
    trainer = Trainer(model, advantages=config.advantages, correction=config.correction, loss=config.loss,
                      reference=config.reference, lora=config.lora, **dict(config.trainer))
    options = RunOptions(name=config.run.name, folder=config.run.folder, seed=config.run.seed, weights=config.weights,
                         probe=config.run.probe, error_budget=config.run.error_budget, deterministic=config.run.deterministic,
                         eval_sets=build_eval_sets(config), colocation=config.colocation, resume="newest" if resumed else None)
    sampling = build_sampling(config, others=sources_of(asked for asked in options.eval_sets if asked.sampling is None))
    return Run(prompts=build_prompts(config), engine=build_engine(config, model=model, version=resumed.version if resumed else 0),
               env=build_env(config, others=sources_of(asked for asked in options.eval_sets if asked.env is None)), sampling=sampling,
               buffer=ReplayBuffer(config.buffer, publish_every_steps=config.weights.publish_every_steps), trainer=trainer, options=options)


def processes_of(config: RunConfig) -> list[str]:
    """What the run would start beside the controller, a line each."""
    rows = ["controller: this process; prompts, buffer, ledger, versions"]
    if not isinstance(config.model, ModelFolder) or isinstance(config.warm_up, CrossEntropyWarmUp):
        rows.append("prepare: 1 child, ends before the run; model and warm-up, unless cached")
    rows.append("engine: in the controller" if isinstance(config.engine, InlineEngineConfig)
                else f"engine: 1 child{_BELOW.get(config.engine.kind, '')}, {config.engine.kind}, {config.engine.threads} thread(s)")
    rows.append(f"trainer: {config.trainer.processes} child(ren), gloo or nccl" if config.trainer.processes
                else "trainer: in the controller")
    rows.append(f"rewards: 1 zygote, {reward_workers(config)} worker(s)")
    return rows


def build_engine(config: RunConfig, *, model: Path, version: int = 0) -> Engine:
    """The engine a configuration describes; its random stream follows the run's seed unless it has one of its own.

    A run resumed at another `version` gets another stream: it would see the numbers again that the first steps were sampled with.
    """
    engine = config.engine
    if isinstance(engine, InlineEngineConfig):
        return InlineEngine(model, lora=config.lora, **dict(engine))
    kind = TransformersEngine if isinstance(engine, TransformersEngineConfig) else VLLMEngine
    seed = config.run.seed if engine.seed is None else engine.seed
    return kind(model, lora=config.lora, **dict(engine) | {"seed": derive_seed(seed, version) % SEEDS if version else seed})
