"""The run: five coroutines round one buffer. Data goes one way round.

    PromptSource ──▶ feed ──▶ roll_out ──▶ ReplayBuffer ──▶ step ──▶ WeightSync ──▶ engines
                       ▲                                                 │
                       └───────────── slots freed by acknowledgements ◀──┘

feed      consumes prompts, produces admitted slots; waits for a free slot; unblocked by drops and by acknowledgements.
roll_out  consumes slots, produces finished rollouts; waits for slots; unblocked by feed.
step      consumes one batch, produces one policy version; waits for whole groups; unblocked by roll_out.
sync      consumes published versions, produces acknowledgements; waits for a version; unblocked by step.
heal      consumes engines that failed or come late, produces acknowledgements; waits for a fence; unblocked by any failure.

A failure in any of them reaches whoever waits: nothing waits in silence.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import shutil
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.accounting import Account, Ledger
from asyncrl.buffer.recorder import BatchRecord, MemoryRecorder
from asyncrl.buffer.replay_buffer import ReplayBuffer
from asyncrl.buffer.view import Slot
from asyncrl.clock import now_s
from asyncrl.colocation import Turns
from asyncrl.errors import AsyncRLError, ConfigError, RunAborted, RunStopped, note_others
from asyncrl.failures import Failures
from asyncrl.meter import Meter
from asyncrl.observer import AsideRollouts, Observer
from asyncrl.parts import check_parts
from asyncrl.paths import RunPaths, make_shared_folder
from asyncrl.rollout.by_source import Samplings, joined
from asyncrl.rollout.engine import Engine
from asyncrl.rollout.env import Env
from asyncrl.rollout.eval_set import own_envs
from asyncrl.rollout.evaluate import first_failure
from asyncrl.rollout.evaluation import Evaluation
from asyncrl.rollout.prompts import PromptSource
from asyncrl.rollout.router import Router
from asyncrl.rollout.timed_engine import TimedEngine
from asyncrl.rollout.worker import Requests, RolloutWorker
from asyncrl.run_options import RunOptions
from asyncrl.run_state import RunState, find_checkpoint, load_state
from asyncrl.step_report import StepReport
from asyncrl.sync import WeightSync
from asyncrl.tokenizer import Tokenizer
from asyncrl.train.checkpoint_store import checkpoint_folder
from asyncrl.train.trainer import StepResult, Trainer
from asyncrl.types import NOT_SAMPLED, Prompt, Rollout

_MAX_SKIPS_IN_A_ROW = 1000


class Run:
    """An asynchronous run: `async with run:` brings everything up, `run.steps(n)` trains, leaving it ends every process.

    Raises ConfigError from the constructor when the parts do not fit one another.
    """

    def __init__(self, *, prompts: PromptSource, engine: Engine | Sequence[Engine], env: Env | Mapping[str, Env], sampling: Samplings,
                 buffer: ReplayBuffer, trainer: Trainer, options: RunOptions | None = None) -> None:
        if not isinstance(prompts, PromptSource):
            raise ConfigError("prompts", value=type(prompts).__name__, allowed="a PromptSource",
                              remedy="Wrap what yields the prompts: PromptSource(...).")
        self.options = options or RunOptions()
        self.prompts, self.sampling, self.buffer, self.trainer = prompts, sampling, buffer, trainer
        self.env: Env = joined(env, own=own_envs(self.options.eval_sets))
        self.engines: tuple[Engine, ...] = tuple(engine) if isinstance(engine, Sequence) else (engine,)
        self._check = functools.partial(check_parts, self.options, prompts=prompts, env=env, sampling=sampling, buffer=buffer.config,
                                        training=trainer.config)
        self._check(engines=self.engines)
        self.ledger = Ledger()
        self.recorder = MemoryRecorder()
        self._attach(version=0)
        self._timed = [TimedEngine(engine) for engine in self.engines]
        self.router = Router(self._timed, config=self.options.weights)
        self.weights = WeightSync(trainer, self.router, buffer, self.options.weights)
        self.turns = Turns(self.options.colocation, router=self.router, trainer=trainer, weights=self.weights)
        self.index = 0
        self.notes: dict[str, Any] = {}
        """The caller's own, as msgpack can carry it: saved with every checkpoint, back after a resume."""
        self._waiting: deque[Prompt] = deque()
        self._slots: asyncio.Queue[Slot] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._entered = self._open = False
        self._probed: tuple[int, list[Rollout]] | None = None
        self.paths: RunPaths
        self._failures: Failures
        self._stream: Iterator[Prompt]

    async def __aenter__(self) -> Run:
        if self._entered:
            raise RuntimeError("a Run is entered once; make another one")
        self._entered = True
        self._failures = Failures(tell=self.buffer.fail)
        self.paths = RunPaths(root=Path(self.options.folder) / self.options.name, shared=make_shared_folder(),
                              transport=self.options.weights.transport.model_dump())
        try:
            self.paths.make()
            await self._start()
        except BaseException as error:
            note_others(error, await self._stop())
            raise
        self._open = True
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Ends every process. A failure that no call has raised yet is raised here, or noted on the error under way.

        Left without an error, it first waits for the checkpoint that is being written.
        """
        failures: list[BaseException] = []
        try:
            if error is None:
                await self.trainer.settle()
        except AsyncRLError as failure:
            failures.append(failure)
        finally:
            failures += await self._stop()
        if self._failures.unreported is not None:
            failures.insert(0, self._failures.unreported)
        if error is not None:
            note_others(error, failures)
        elif failures:
            raise failures[0]

    async def steps(self, count: int) -> AsyncIterator[StepReport]:
        """Train `count` steps, one report each. Rollouts go on while the caller works on a report.

        Ends early, without error, when the prompts end, and raises RunStopped after `stop`. Raises the first failure of any coroutine.
        """
        for _ in range(count):
            report = await self.step()
            if report is None:
                return
            yield report

    def stop(self) -> None:
        """Begin no further step. The one under way goes on to its end; whoever waits for a batch, evaluation or probe gets RunStopped."""
        self._failures.end(RunStopped("the run was told to stop"))

    async def feed(self) -> None:
        """Admit prompts. Waits for a free slot; unblocked by drops and acknowledgements; ends with the data."""
        skips = 0
        while self._has_waiting():
            prompt = self._waiting[0]
            if len(prompt.tokens) >= self.router.context_tokens:
                self.prompts.skip(prompt, "no_room")
                skips += 1
                if skips == _MAX_SKIPS_IN_A_ROW:
                    raise RunAborted(f"{skips} prompts in a row leave no room for an answer: the newest has {len(prompt.tokens)} tokens, "
                                     f"the engine's context {self.router.context_tokens}. Shorten them, or raise engine.context_tokens.")
            else:
                skips = 0
                self._slots.put_nowait(await self.buffer.admit(prompt))
            self._waiting.popleft()
        self.buffer.end_of_data()

    async def roll_out(self) -> None:
        """Run the rollouts of each slot. Waits for slots; unblocked by feed; completes groups in the buffer."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                slot = await self._slots.get()
                for index in range(self.buffer.config.group_size):
                    tasks.create_task(self._roll_out_one(slot, index))

    async def step(self) -> StepReport | None:
        """Train on the next batch and publish. Waits for whole groups; unblocked by roll_out. None when the data has ended.

        The first call starts the other four coroutines. Raises the first failure of any of them.
        """
        self._produce()
        await self._probe_when_due()
        began_s = now_s()
        batch = await self._failures.or_result(self.buffer.take())
        if batch is None:
            await self._judge_probe()
            return None
        waited_s = now_s() - began_s
        with self._meter.trainer("sync"):
            await self._failures.or_result(self.turns.to_trainer())
        await self._judge_probe()
        self.recorder.batch_recorded(BatchRecord.of(batch, seed=self.options.seed, learning_rate=self.trainer.learning_rate))
        with self._meter.trainer("step", blocks=not self.trainer.config.trainer.processes):
            result = await self.trainer.step(batch)
        self.buffer.trained(batch)
        self.ledger.trained(batch, trained_tokens=result.trained_tokens, masked_tokens=result.masked_tokens)
        self.recorder.step_done(batch.version)
        self.index += 1
        if self.trainer.checkpoint_due:
            with self._meter.trainer("checkpoint"):
                await self.trainer.checkpoint(self.state().to_bytes())
        if result.version % self.options.weights.publish_every_steps == 0:
            with self._meter.trainer("sync"):
                await self.turns.to_engines()
                await self.weights.publish()
        self.account()
        return StepReport(index=self.index, version=result.version, metrics=self._measure(result, waited_s=waited_s), batch=batch)

    async def sync(self) -> None:
        """Bring published versions to the engines. Waits for a version; unblocked by step; unblocks feed. Journals what it interrupted."""
        while True:
            await self.weights.apply_next()
            for key, sequences in self.worker.partial():
                self.recorder.partial(key, sequences)

    async def add_engine(self, engine: Engine) -> None:
        """Start one more engine, which serves once it has acknowledged the newest version. Raises ConfigError, or what its start does."""
        self._require_open()
        self.weights.require_late_joiners()
        self._check(engines=(*self.engines, engine))
        await engine.start(self.paths)
        self.engines = (*self.engines, engine)
        self.buffer.add_engine(engine.name, NOT_SAMPLED)
        timed = TimedEngine(engine)
        self._meter.joined(timed)
        self.router.add(timed)

    async def evaluate(self) -> Evaluation:
        """Rewards and pass@k on `options.eval_sets`. Waits until the engines hold the newest version; unblocked by sync.

        Raises ConfigError without sets: a mean over nothing is no reward.
        """
        self._require_open()
        with self._meter.aside():
            return await self._failures.or_result(self.observer.evaluate())

    @property
    def is_between_steps(self) -> bool:
        """Whether no batch is being trained on."""
        return not self.buffer.batch_is_out

    def state(self) -> RunState:
        """What a checkpoint of now holds beside the trainer's weights. Raises LedgerError: an account that does not close never will."""
        account = self.account().given_up("resume")
        return RunState(index=self.index, version=self.trainer.version, prompts=self.prompts.state(),
                        unfinished=(*self.buffer.unfinished(), *self._waiting), account=account, buffer=self.buffer.state(),
                        notes=self.notes)

    async def save(self) -> None:
        """Write a checkpoint of now; returns when it is whole. To be called between two steps."""
        await self.trainer.save(checkpoint_folder(self.paths.checkpoints, self.trainer.version), self.state().to_bytes())

    async def export(self, path: str | Path) -> None:
        """Write a Hugging Face folder of the current weights. Its time belongs to no step. Raises NonFiniteError."""
        with self._meter.aside():
            await self.trainer.export(path)

    async def finish(self) -> None:
        """Stop producing for good. What is running or buffered is dropped as `end_of_run`, so that the ledger closes on it too."""
        self._open = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        self.buffer.drop_all("end_of_run")

    def account(self) -> Account:
        """The ledger, counted now. Raises LedgerError when it does not close."""
        return self.ledger.check(buffered=self.buffer.held(), in_flight=self.worker.in_flight())

    async def _start(self) -> None:
        self.tokenizer = Tokenizer(self.trainer.model)
        self.env.start(self.paths.logs, self.tokenizer)
        checkpoint = find_checkpoint(self.paths.checkpoints, self.options.resume)
        if checkpoint:
            self._restore(load_state(checkpoint))
        self._stream = self.prompts.stream(self.tokenizer)
        self._waiting.extend(itertools.islice(self._stream, max(0, self.options.probe.prompts - len(self._waiting))))
        probed = tuple(itertools.islice(self._waiting, self.options.probe.prompts))
        try:
            async with asyncio.TaskGroup() as tasks:
                trainer_starts = tasks.create_task(self._start_trainer(checkpoint))
                if self.turns.taken:
                    await trainer_starts
                for engine in self.engines:
                    tasks.create_task(engine.start(self.paths))
        except BaseExceptionGroup as failures:
            raise first_failure(failures) from None
        for engine in self.engines:
            self.buffer.add_engine(engine.name, self.trainer.version)
        self.worker = RolloutWorker(self.router, self.env, sampling=self.sampling, ledger=self.ledger, seed=self.options.seed,
                                    error_budget=self.options.error_budget,
                                    requests=Requests(self.options.deterministic, self.trainer.config.wanted))
        aside = AsideRollouts(self.router, self.env, self.sampling, self.options.seed, self.buffer.config.stall_timeout_s,
                              self.options.deterministic)
        self.observer = Observer(aside, sets=[asked.completed(self.tokenizer) for asked in self.options.eval_sets], probed=probed,
                                 probe=self.options.probe, weights=self.weights, trainer=self.trainer)
        await self.weights.start()
        self._meter = Meter(self.router, self._timed)

    async def _start_trainer(self, checkpoint: Path | None) -> None:
        await self.trainer.start(self.paths, weights=self.turns.published(self.options.weights), deterministic=self.options.deterministic)
        if checkpoint:
            await self.trainer.restore(checkpoint)
        await self.turns.to_engines()

    def _restore(self, state: RunState) -> None:
        """Go on from a checkpoint: counters as they were, prompts that were not finished first."""
        self.index, self.notes = state.index, dict(state.notes)
        self.prompts.restore(state.prompts)
        self._waiting.extend(state.unfinished)
        self.ledger = Ledger(state.account)
        self._attach(version=state.version)
        self.buffer.restore(state.buffer)

    def _attach(self, *, version: int) -> None:
        self.buffer.attach(publish_every_steps=self.options.weights.publish_every_steps, version=version, ledger=self.ledger,
                           recorder=self.recorder)

    def _has_waiting(self) -> bool:
        """Whether a prompt waits to be admitted, those to begin anew first; one is asked for when none does."""
        self._waiting.extendleft(reversed(self.buffer.refills()))
        if not self._waiting:
            self._waiting.extend(itertools.islice(self._stream, 1))
        return bool(self._waiting)

    async def _stop(self) -> list[BaseException]:
        """Close every part, also when cancelled on the way; gives what closing failed with."""
        closed: list[BaseException | None] = []
        try:
            await self.finish()
        finally:
            try:
                parts = (self.trainer, self.env, *self.engines)
                closed = await asyncio.gather(*(part.close() for part in parts), return_exceptions=True)
            finally:
                shutil.rmtree(self.paths.shared, ignore_errors=True)
        return [failure for failure in closed if failure is not None]

    def _produce(self) -> None:
        """Start feed, roll_out, sync and heal, unless they run."""
        self._require_open()
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._failures.watched(part), name=name)
                           for name, part in (("feed", self.feed()), ("roll_out", self.roll_out()), ("sync", self.sync()),
                                             ("heal", self.weights.healing.run(self.paths)))]

    def _require_open(self) -> None:
        if not self._open:
            raise RuntimeError("the run is not open: use it inside `async with run:`, and before finish()")

    async def _roll_out_one(self, slot: Slot, index: int) -> None:
        rollout = await self.worker.run(slot.prompt, group_id=slot.group_id, index=index)
        self.buffer.complete(rollout)
        self.prompts.observe(slot.prompt, rollout)
        self._meter.scored(rollout)

    async def _probe_when_due(self) -> None:
        if not self.observer.probe_is_due(self.index) or self.weights.published_version != self.trainer.version:
            return
        with self._meter.aside():
            self._probed = await self._failures.or_result(self.observer.roll_out_probe(self.index))
        if not self.turns.taken:
            await self._judge_probe()

    async def _judge_probe(self) -> None:
        """Where there are turns, in the trainer's."""
        if self._probed is not None:
            (version, rollouts), self._probed = self._probed, None
            with self._meter.aside():
                parity = await self.observer.judge_probe(version, rollouts)
            self._meter.probed(parity)

    def _measure(self, result: StepResult, *, waited_s: float) -> dict[str, float]:
        metrics = self._meter.step(waited_s=waited_s, trained_tokens=result.trained_tokens, trained=result.metrics.result())
        for part in (result.metrics, self.buffer.metrics(), self.weights.take_metrics(), self.turns.take_metrics(),
                     self.prompts.metrics()):
            metrics.merge(part)
        found = metrics.result()
        return found | self._meter.split(found)
