"""Three steps of a real run, watched from outside: two FSDP2 ranks over gloo, an engine, a reward worker, all as the library has them.

The second rank, which holds the element, runs in this process, where its optimizer and its tensors can be looked at; the first
one is the usual child. Nothing in the library knows of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.utils import logging

from asyncrl import InlineEngine, PromptSource, ReplayBuffer, Run, RunOptions, Sampling, SingleTurn, StepReport, Trainer
from asyncrl.channel import Reply, Request
from asyncrl.correction.batch import Corrected, CorrectionBatch
from asyncrl.functions import load_function
from asyncrl.paths import RunPaths
from asyncrl.rollout.engine import Ack, Chunk, GenerationRequest
from asyncrl.train import rank, rank_group, step
from asyncrl.train.batch import PackedBatch
from asyncrl.train.config import TrainConfig
from asyncrl.train.model import Policy
from asyncrl.train.optim import Optimizer, Update
from asyncrl.train.parallel import local
from asyncrl.train.rank_group import ChildRanks
from asyncrl.train.rank_spec import RankSpec
from asyncrl.types import Prompt
from asyncrl.weights.codec import Bits
from asyncrl.weights.config import WeightsConfig
from asyncrl.weights.manifest import Manifest
from asyncrl.weights.store import StoreTransport
from asyncrl.weights.torch_pieces import bits_of, checkpoint_tensors

TENSOR = "model.layers.0.mlp.down_proj.weight"
MODEL = {"layers": 2, "hidden": 32, "heads": 2, "intermediate": 64, "initializer_range": 0.15}
SUMS = ((12, 34), (56, 17))
BUFFER = {"groups_per_step": 2, "group_size": 8, "max_staleness": 1, "policy": {"kind": "fixed_lag", "lag_steps": 1}}
"""Version 0 writes the batches of the first two steps: those of the second are one step old, on every machine."""
TRAINER = {"advantages": "grpo", "correction": "token_tis", "loss": "decoupled_ppo", "learning_rate": 1e-4, "processes": 2}
NEW_TOKENS = 3
STEPS = 3
_TASK = Path(__file__).parents[2] / "recipes" / "arithmetic" / "task.py"


def share_of_digits(prompt: Prompt, completion: str) -> float:
    """What a model with random weights can learn first: to write digits."""
    return sum(character.isdigit() for character in completion) / NEW_TOKENS


@dataclass(frozen=True, slots=True, eq=False)
class UpdateSeen:
    """One call of the optimizer, as the watched rank's shard of the tensor went through it."""

    update: Update
    learning_rate: float
    number: int
    """AdamW's own count, from 1."""
    gradient: Tensor
    clipped_gradient: Tensor
    master: tuple[Tensor, Tensor]
    """Before and after; the moments too."""
    first_moment: tuple[Tensor, Tensor]
    second_moment: tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Applied:
    """One version reaching the engine."""

    manifest: Manifest
    parts: tuple[NDArray[np.uint8], ...]
    """Bytes of each part, copied from the store."""
    before: Mapping[str, Bits]
    """The engine's memory, by tensor: flat float32 bits."""
    after: Mapping[str, Bits]
    ack: Ack


@dataclass(slots=True, eq=False)
class Recording:
    """All that was seen, in order of the steps."""

    model: Path
    settings: TrainConfig
    loading: threading.Lock = field(default_factory=threading.Lock)
    """Two threads of one process cannot load a model with transformers at the same time."""
    exports: dict[int, Path] = field(default_factory=dict)
    """The trainer's float32 weights by version, as Hugging Face folders."""
    shards: list[Any] = field(default_factory=list)
    """Of TENSOR on the watched rank: its layout, before the first step."""
    updates: list[UpdateSeen] = field(default_factory=list)
    batches: list[PackedBatch] = field(default_factory=list)
    corrections: list[tuple[CorrectionBatch, Corrected]] = field(default_factory=list)
    traces: list[step.Traces] = field(default_factory=list)
    applied: list[Applied] = field(default_factory=list)
    requests: list[tuple[GenerationRequest, Chunk]] = field(default_factory=list)
    """Each with the chunk that held its first token."""
    reports: list[StepReport] = field(default_factory=list)


class ObservedRanks:
    """The ranks of a trainer; the last of them in this process, in a thread of its own, the others children."""

    def __init__(self, children: ChildRanks, here: rank.RankTrainer, thread: ThreadPoolExecutor) -> None:
        self._children, self._here, self._thread = children, here, thread

    @classmethod
    async def start(cls, specs: Sequence[RankSpec], *, logs: Path, start_timeout_s: float) -> ObservedRanks:
        """As `ChildRanks.start`."""
        thread = ThreadPoolExecutor(1, thread_name_prefix="rank")
        children, here = await asyncio.gather(ChildRanks.start(specs[:-1], logs=logs, start_timeout_s=start_timeout_s),
                                              asyncio.get_running_loop().run_in_executor(thread, rank.RankTrainer, specs[-1]))
        return cls(children, here, thread)

    async def call(self, op: str, body: Mapping[str, Any], *, arrays: Mapping[str, NDArray[Any]], timeout_s: float) -> list[Reply]:
        """As `RankGroup.call`."""
        request = Request(op, body=body, arrays=arrays)
        theirs, mine = await asyncio.gather(self._children.call(op, body, arrays=arrays, timeout_s=timeout_s),
                                            self._run(self._here.handlers()[op], request))
        return [*theirs, mine if isinstance(mine, Reply) else Reply(mine or {})]

    async def kill(self) -> None:
        """As `RankGroup.kill`."""
        await self._children.kill()

    async def close(self) -> None:
        """As `RankGroup.close`."""
        await asyncio.gather(self._children.close(), self._run(self._here.close))
        self._thread.shutdown()

    def _run(self, work: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)


class WatchedEngine(InlineEngine):
    """The engine, and a note of each request's first token and of its memory round every update."""

    def __init__(self, model: Path, recording: Recording) -> None:
        super().__init__(model)
        self._recording = recording
        self._store: StoreTransport

    async def start(self, paths: RunPaths) -> None:
        """As the engine's."""
        self._store = StoreTransport(paths.weights)
        with self._recording.loading:
            await super().start(paths)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """As the engine's."""
        first = True
        async with aclosing(super().generate(request)) as chunks:
            async for chunk in chunks:
                if first and len(chunk.tokens):
                    self._recording.requests.append((request, chunk))
                    first = False
                yield chunk

    async def apply(self, manifest: Manifest) -> Ack:
        """As the engine's."""
        parts = tuple(self._store.open_part(part).copy() for part in manifest.parts)
        before = self._memory()
        ack = await super().apply(manifest)
        self._recording.applied.append(Applied(manifest, parts=parts, before=before, after=self._memory(), ack=ack))
        return ack

    def _memory(self) -> dict[str, Bits]:
        assert self._model is not None
        return {name: bits_of(tensor).copy() for name, tensor in checkpoint_tensors(self._model).items()}


@contextlib.contextmanager
def watching(recording: Recording) -> Iterator[None]:
    """While it lasts, the trainer's parts tell `recording` what they are given and what they give."""

    class WatchedOptimizer(Optimizer):
        def __init__(self, parameters: Iterable[tuple[str, torch.nn.Parameter]], **others: Any) -> None:
            named = list(parameters)
            super().__init__(named, **others)
            self._watched = dict(named)[TENSOR]
            recording.shards.append(self._watched)

        def update(self, *, version: int, scale: float = 1.0) -> Update:
            gradient = local(self._watched.grad)  # clipping scales it in place
            raw, before = gradient.clone(), self._state()
            update = super().update(version=version, scale=scale)
            master, first, second = zip(before, self._state(), strict=True)
            recording.updates.append(UpdateSeen(
                update, learning_rate=self._config.learning_rate_at(version), number=self.updates, gradient=raw,
                clipped_gradient=gradient.clone(), master=master, first_moment=first, second_moment=second))
            return update

        def _state(self) -> tuple[Tensor, ...]:
            moments = self.moments()
            watched = (self._watched, moments[f"exp_avg/{TENSOR}"], moments[f"exp_avg_sq/{TENSOR}"])
            return tuple(local(tensor).detach().clone() for tensor in watched)

    def load_policy(source: Path, **settings: int) -> Policy:
        with recording.loading:
            return real_load(source, **settings)

    def train_step(trainee: step.Trainee, batch: PackedBatch) -> step.StepOutcome:
        recording.batches.append(batch)
        return step.train_step(trainee, batch)

    def correct(batch: CorrectionBatch, correction: Any) -> Corrected:
        recording.corrections.append((batch, real_correct(batch, correction)))
        return recording.corrections[-1][1]

    def traces(*rows: Tensor, updates: list[Update]) -> step.Traces:
        recording.traces.append(real_traces(*rows, updates=updates))
        return recording.traces[-1]

    real_load, real_correct, real_traces = rank.load_policy, step.correct, step.Traces
    with (mock.patch.object(rank_group, "ChildRanks", ObservedRanks), mock.patch.object(rank, "Optimizer", WatchedOptimizer),
          mock.patch.object(rank, "load_policy", load_policy), mock.patch.object(rank, "train_step", train_step),
          mock.patch.object(step, "correct", correct), mock.patch.object(step, "Traces", traces),
          mock.patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": "lo"})):
        yield


def record(folder: Path) -> Recording:
    """Make a model and train it for three steps in `folder`."""
    logging.disable_progress_bar()
    torch.set_num_threads(1)  # of this thread, the engine's; with another number the last digits would be others
    model = folder / "model"
    model.mkdir(parents=True)
    load_function(f"{_TASK}:tiny_qwen3", field="model")(model, **MODEL)
    trainer = Trainer(model, **TRAINER)
    recording = Recording(model=model, settings=trainer.config)
    with watching(recording):
        asyncio.run(_train(recording, trainer, folder))
    return recording


async def _train(recording: Recording, trainer: Trainer, folder: Path) -> None:
    as_prompt = load_function(f"{_TASK}:as_prompt", field="prompts")
    run = Run(prompts=PromptSource([as_prompt(*pair, "sums") for pair in SUMS]), engine=WatchedEngine(recording.model, recording),
              env=SingleTurn(share_of_digits), sampling=Sampling(temperature=1.0, max_new_tokens=NEW_TOKENS),
              buffer=ReplayBuffer(**BUFFER), trainer=trainer,
              options=RunOptions(folder=folder, weights=WeightsConfig(dtype="bfloat16", interruption="drain")))
    async with run:
        for version in range(1, STEPS + 1):
            report = await run.step()
            assert report is not None
            recording.reports.append(report)
            recording.exports[version] = folder / f"version-{version}"
            await run.trainer.export(recording.exports[version])
