"""What a configuration leads to, observed part by part without starting a process: objects, recorded calls, small real computations."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl import run_folder, training
from asyncrl.buffer.replay_buffer import ReplayBuffer
from asyncrl.channel import Reply
from asyncrl.child import Child
from asyncrl.clock import now_s, run_virtual
from asyncrl.config import RunConfig
from asyncrl.errors import BufferStarved, ChildDied, RunAborted
from asyncrl.lora_config import LoRA
from asyncrl.observe.console import Console
from asyncrl.observe.plain import PlainFace
from asyncrl.paths import RunPaths
from asyncrl.rollout import env, inline_wave, loaded_model
from asyncrl.rollout.engine import GenerationRequest, Interruption
from asyncrl.rollout.evaluation import Evaluation
from asyncrl.rollout.fake_engine import FakeEngine
from asyncrl.rollout.router import Router
from asyncrl.step_report import StepReport
from asyncrl.sync import WeightSync
from asyncrl.tokenizer import Tokenizer
from asyncrl.train import rank_group
from asyncrl.train.batch import pack
from asyncrl.train.config import TrainConfig
from asyncrl.train.prepare import prepare
from asyncrl.train.rank import RankTrainer
from asyncrl.train.rank_spec import RankSpec
from asyncrl.train.ready import compute_dtype
from asyncrl.train.step import minibatches_of, train_step
from asyncrl.train.trainer import Trainer
from asyncrl.types import Batch, Prompt, Status
from asyncrl.weights.ends import TransportSpec
from tests.buffer.buffer_fakes import rollout as buffer_rollout
from tests.rollout.model_rig import PublishedModel
from tests.test_sync import Publishing
from tests.timeless import timeless
from tests.tiny_moe import make_tiny_moe
from tests.train.train_data import random_batch


class Scene:
    """A model, a folder and the means to put something else in the place of a part."""

    def __init__(self, published: PublishedModel, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.published, self.model, self.folder, self.patch = published, published.folder, folder, patch
        self.paths = RunPaths(root=folder / "run", shared=folder / "shared")
        self.paths.make()


Observer = Callable[[RunConfig, Scene], object]


def processes(config: RunConfig, scene: Scene) -> object:
    """The processes a run would start."""
    return training.processes_of(config)


def parts(config: RunConfig, scene: Scene) -> object:
    """The parts `build` makes: data, environment, sampling, policy, depth, options."""
    pools: list[object] = []
    scene.patch.setattr(env, "RewardPool", lambda functions, **settings: pools.append(([f.__name__ for f in functions], settings)))
    run = training.build(config, model=scene.model)
    prompts = [(prompt.text, prompt.columns) for prompt in islice(run.prompts.stream(Tokenizer(scene.model)), 50)]
    return pools, prompts, run.sampling, repr(run.buffer.policy), run.buffer.view().depth_groups, run.options


def engine_spec(config: RunConfig, scene: Scene) -> object:
    """What the engine's child is told, and what the engine then can do."""
    told: dict[str, Any] = {}

    async def start(module: str, **settings: object) -> None:
        told.update(settings)
        raise ChildDied("enough was seen")

    scene.patch.setattr(Child, "start", start)
    engine = training.build_engine(config, model=scene.model)
    with contextlib.suppress(ChildDied):
        asyncio.run(engine.start(scene.paths))
    return told["spec"], told["env"], engine.capabilities


def inline_engine(config: RunConfig, scene: Scene) -> object:
    """The dtype an inline engine loads its model in, its limits, size and threads of its waves, and what it reports, when three requests
    come at once."""
    threads = torch.get_num_threads()
    dtypes, waves, written, real_load, real_wave = [], [], [], loaded_model.load_model, inline_wave.Wave

    def load(folder: Path, *, dtype: str, lora: LoRA | None) -> object:
        dtypes.append(dtype)
        return real_load(folder, dtype="float32", lora=lora)

    class Watched(real_wave):
        def step(self) -> Any:
            size, ended = len(self.rows), super().step()
            waves.append((size, torch.get_num_threads()))
            return ended

    async def main() -> None:
        engine = training.build_engine(config, model=scene.model)
        await engine.start(scene.published.paths)
        await engine.pause(Interruption.DRAIN)
        await engine.apply(scene.published.manifest(0, None))
        await engine.resume()

        async def one(number: int) -> None:
            request = GenerationRequest(str(number), np.array([3, 4], np.int32), config.sampling.build(), seed=number)
            async for chunk in engine.generate(request):
                written.append((number, chunk.logprobs.tolist()))

        await asyncio.gather(*(one(number) for number in range(3)))
        dtypes.append(engine.capabilities)
        await engine.close()

    scene.patch.setattr(loaded_model, "load_model", load)
    scene.patch.setattr(inline_wave, "Wave", Watched)
    try:
        asyncio.run(main())
    finally:
        torch.set_num_threads(threads)
    return dtypes, waves, written


def buffer_story(config: RunConfig, scene: Scene) -> object:
    """A buffer that is filled, starved, and fed with groups of equal rewards to the end."""
    size, story = config.buffer.group_size, []

    async def group(buffer: ReplayBuffer, rewards: list[float], *, errors: int = 0) -> None:
        async with asyncio.timeout(1.0):
            slot = await buffer.admit(Prompt())
        for index in range(size):
            failed = index < errors
            buffer.complete(buffer_rollout(slot.group_id, index, (0, 3), reward=rewards[index % len(rewards)],
                                           status=Status.ENV_ERROR if failed else Status.STOP))
        story.append((slot.group_id, [str(held.state) for held in buffer.view().slots], buffer.held()))

    async def main() -> None:
        buffer = ReplayBuffer(config.buffer)
        buffer.add_engine("engine", 0)
        story.append((repr(buffer.policy), buffer.view().depth_groups))
        with contextlib.suppress(TimeoutError):
            await group(buffer, [0.0, 1.0], errors=size - 2)
            await group(buffer, [1.0, 1.0 + 5e-4])
            await group(buffer, [1.0])
        began_s = now_s()
        try:
            batch = await buffer.take()
            story.append([held.group_id for held in batch.groups] if batch else None)
        except BufferStarved:
            story.append(("starved after", now_s() - began_s))
        for _ in range(40):
            try:
                await group(buffer, [1.0])
            except (TimeoutError, RunAborted) as end:
                story.append(type(end).__name__)
                break

    run_virtual(main())
    return story


def trained_on_equal_rewards(config: RunConfig, scene: Scene) -> object:
    """As `trained`, on groups that are all equally good once the policy has moved."""
    return trained(config, scene, later_rewards=1.0)


def routed(config: RunConfig, scene: Scene) -> object:
    """What the engine is asked to record, and metrics of a step of a mixture of experts."""
    model = make_tiny_moe(scene.paths.root / "moe")
    settings = config.training.model_copy(update={"trainer": config.trainer.model_copy(update={"processes": 0, "dtype": "auto"})})
    rank = RankTrainer(RankSpec(model=str(model), rank=0, world_size=1, rendezvous=None, transport=TransportSpec.of(scene.paths),
                                published_dtype="float32", config=settings))
    outcome = train_step(rank._trainee, pack(random_batch(0)))
    return timeless(outcome.metrics.result()), config.training.wanted


def trained(config: RunConfig, scene: Scene, *, later_rewards: float | None = None) -> object:
    """Weights and metrics after three real steps of the one rank, how it cuts a batch, its threads, and the arithmetic asked for."""
    threads = torch.get_num_threads()
    settings = TrainConfig(trainer=config.trainer.model_copy(update={"processes": 0, "dtype": "auto"}), advantages=config.advantages,
                           correction=config.correction, loss=config.loss, reference=config.reference, lora=config.lora)
    asked = settings.model_copy(update={"trainer": config.trainer})
    try:
        rank = RankTrainer(RankSpec(model=str(scene.model), rank=0, world_size=1, rendezvous=None, transport=TransportSpec.of(scene.paths),
                                    published_dtype="float32", config=settings))
        metrics = []
        for version in range(3):
            packed = pack(random_batch(version, version=version))
            if version and later_rewards is not None:
                packed.rewards[:] = later_rewards
            outcome = train_step(rank._trainee, packed)
            metrics.append(timeless(outcome.metrics.result()))
        cuts = [len(minibatch.inputs) for minibatch in minibatches_of(rank._trainee, pack(random_batch(0)))]
        weights = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in rank._lm.parameters())).hexdigest()
        return weights, metrics, cuts, torch.get_num_threads(), compute_dtype(asked.trainer, torch.device("cpu"))
    finally:
        torch.set_num_threads(threads)


def published(config: RunConfig, scene: Scene) -> object:
    """Base and dtype of three versions a real rank publishes."""
    async def main() -> list[object]:
        trainer = Trainer(scene.model, correction=config.correction, **(dict(config.trainer) | {"processes": 0}))
        await trainer.start(scene.paths, weights=config.weights)
        manifests = []
        for version in range(3):
            manifests.append(await trainer.publish())
            await trainer.step(random_batch(version, version=version))
        return [(manifest.base, manifest.tensors[0].dtype) for manifest in manifests]

    return asyncio.run(main())


def supervised_ranks(config: RunConfig, scene: Scene) -> object:
    """What the trainer asks of scripted ranks that work, meet NaN, and die: starts, calls with their limits, checkpoints."""
    story: list[object] = []

    class Ranks:
        def __init__(self, count: int) -> None:
            self.count = count

        async def call(self, op: str, body: dict[str, Any], *, arrays: object, timeout_s: float) -> list[Reply]:
            story.append((op, timeout_s, Path(body.get("record", "")).name))
            if behaviour == "dies" and op == "step":
                raise ChildDied("killed")
            if op == "save":
                (Path(body["folder"]) / "rank-00000-000.safetensors").write_bytes(b"weights")
            return [Reply({"metrics": {}, "skipped": False, "nonfinite": behaviour == "nan", "trained_tokens": 0, "updates": 1,
                           "done": True, "files": [{"name": "rank-00000-000.safetensors", "bytes": 7, "xxh3": ""}]})] * self.count

        async def kill(self) -> None:
            pass

    async def start(specs: list[RankSpec], *, logs: Path, start_timeout_s: float) -> Ranks:
        story.append(("start", len(specs), start_timeout_s))
        return Ranks(len(specs))

    async def main() -> None:
        trainer = Trainer(scene.model, correction=config.correction, **dict(config.trainer))
        await trainer.start(scene.paths, weights=config.weights)
        with contextlib.suppress(RunAborted):
            for version in range(6):
                await trainer.step(random_batch(0, version=version))
                if trainer.checkpoint_due:
                    await trainer.checkpoint()

    scene.patch.setattr(rank_group.ChildRanks, "start", start)
    for behaviour in ("works", "nan", "dies"):
        story.append(behaviour)
        asyncio.run(main())
    return story


def updates(config: RunConfig, scene: Scene) -> object:
    """The calls an engine gets when weights arrive."""
    async def main() -> object:
        engine = FakeEngine()
        buffer = ReplayBuffer(config.buffer)
        buffer.add_engine(engine.name, 0)
        await WeightSync(Publishing(), Router([engine]), buffer, config.weights).start()  # type: ignore[arg-type]
        return [(name, value) for name, value in engine.calls if name == "pause"]

    return run_virtual(main())


def course(config: RunConfig, scene: Scene, *, most_steps: int = 100) -> list[object]:
    """Steps and evaluations of a run, in order; its data end after `most_steps`."""
    happened: list[object] = []

    class Course:
        index = 0
        tokenizer = Tokenizer(scene.model)

        async def steps(self, count: int) -> Any:
            for self.index in range(1, min(count, most_steps) + 1):
                yield StepReport(self.index, self.index, {}, Batch(self.index, ()))

        trainer = SimpleNamespace(version=0)
        weights = SimpleNamespace(publish=lambda: asyncio.sleep(0))
        export = None

        async def evaluate(self) -> Evaluation:
            return Evaluation({}, version=0)

    class Folder:
        def begin(self) -> None:
            happened.append("begin")

        def was_evaluated(self, step: int) -> bool:
            return ("eval", step) in happened

        def end(self) -> None:
            happened.append("end")

        def data_ended(self, steps: int) -> None:
            """Said to people alone."""

        def stepped(self, report: StepReport, **_: object) -> None:
            happened.append(("step", report.index))

        def resume_best(self, version: int) -> None:
            happened.append(("best so far of", version))

        async def evaluated(self, step: int, _: object, *, export: object) -> None:
            happened.append(("eval", step))

    asyncio.run(training._train_steps(Course(), config, Folder()))  # type: ignore[arg-type]
    return happened


def folder(config: RunConfig, scene: Scene) -> object:
    """The folder of a run after three steps, and what its tracker was told."""
    trackers: list[object] = []

    class Tracker:
        dropped = 0

        def __init__(self, **settings: Any) -> None:
            trackers.append(settings["project"])

        def write(self, row: object) -> None:
            trackers.append("row")

        def close(self) -> None:
            trackers.append("close")

    scene.patch.setattr(run_folder, "WandbWriter", Tracker)
    scene.patch.chdir(scene.folder)
    console = Console(PlainFace(lambda line: None))
    written = run_folder.RunFolder(config, console=console)
    written.track()
    for index in (1, 2, 3):
        written.stepped(StepReport(index, index, {}, random_batch(0)), decode=lambda tokens: "")
    written.close()
    console.close()
    return str(written.path), (written.path / "rollouts.jsonl").read_text(), trackers


def prepared(config: RunConfig, scene: Scene) -> object:
    """The model folder RL starts from: where it is, or how a short warm-up makes it."""
    if config.model.kind == "folder":
        return asyncio.run(training.prepare_model(config, logs=scene.paths.logs, echo=lambda line: None))
    threads, target = torch.get_num_threads(), scene.folder / "prepared"
    try:
        report: object = prepare(config.model, config.warm_up, folder=target)
        weights = hashlib.sha256((target / "model.safetensors").read_bytes()).hexdigest()
    except RunAborted as error:
        report, weights = str(error), ""
    finally:
        used = torch.get_num_threads()
        torch.set_num_threads(threads)
    return report, weights, used
