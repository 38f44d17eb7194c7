"""The main job: from a configuration to a folder with a trained model, its metrics and a summary."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl.buffer.replay_buffer import ReplayBuffer
from asyncrl.child import Child
from asyncrl.config import RunConfig, Wandb, dump_config
from asyncrl.functions import load_function
from asyncrl.loop import Run, RunOptions, StepReport
from asyncrl.observe.console import HEADER, step_line
from asyncrl.observe.jsonl import JsonlWriter, sample_rows
from asyncrl.observe.plots import plot_reward
from asyncrl.observe.summary import edge_rewards, largest_of, mean_of, reward_curve, total_of
from asyncrl.observe.wandb_writer import WandbWriter
from asyncrl.rollout.config import EngineConfig, InlineEngineConfig
from asyncrl.rollout.engine import Engine
from asyncrl.rollout.env import SingleTurn
from asyncrl.rollout.evaluate import Evaluation
from asyncrl.rollout.inline_engine import InlineEngine
from asyncrl.rollout.prompts import PromptSource, read_jsonl
from asyncrl.rollout.task_config import JsonlPrompts, PromptsConfig, PromptsEval
from asyncrl.rollout.transformers_engine import TransformersEngine
from asyncrl.train.prepare import cache_key
from asyncrl.train.prepare_config import CrossEntropyWarmUp, ModelFolder
from asyncrl.train.trainer import Trainer
from asyncrl.types import Prompt

Echo = Callable[[str], None]

_PREPARE_TIMEOUT_S = 3600.0


async def train(config: RunConfig, *, echo: Echo) -> dict[str, Any]:
    """Prepare the model, run `run.steps` steps, write everything under `run.folder/run.name`. Returns the summary."""
    folder = Path(config.run.folder) / config.run.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    model = await prepare_model(config, logs=folder / "logs", echo=echo)
    run = build(config, model=model)
    journal = Journal(config, folder, echo=echo)
    try:
        async with run:
            await _train_steps(run, config, journal)
            await run.finish()
            await run.trainer.export(folder / "model")
            summary = journal.summary(run)
    finally:
        journal.close()
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    journal.plot()
    echo(f"reward {summary['reward_first']:.3f} → {summary['reward_last']:.3f}, held-out {summary['eval_before']} → "
         f"{summary['eval_after']}, {summary['steps']} steps in {summary['wall_s']:.0f} s; see {folder}")
    return summary


async def _train_steps(run: Run, config: RunConfig, journal: Journal) -> None:
    every = config.eval.every_steps if isinstance(config.eval, PromptsEval) else 0
    if every:
        journal.evaluated(0, await run.evaluate())
    journal.begin()
    async for report in run.steps(config.run.steps):
        journal.stepped(report, decode=run.tokenizer.decode)
        if every and (report.index % every == 0 or report.index == config.run.steps):
            journal.evaluated(report.index, await run.evaluate())
    journal.end()


async def prepare_model(config: RunConfig, *, logs: Path, echo: Echo) -> Path:
    """The folder RL starts from: made, warmed up and cached in a child, so that nothing of it stays in this process."""
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
            await child.call("prepare", timeout_s=_PREPARE_TIMEOUT_S)
        finally:
            await child.close()
        echo(f"model: prepared in {time.monotonic() - began_s:.0f} s, {folder}")
    return folder


def build(config: RunConfig, *, model: Path) -> Run:
    """The run a configuration describes, from `model` on; starts nothing."""
    trainer = Trainer(model, advantages=config.advantages, correction=config.correction, loss=config.loss,
                      **dict(config.trainer))
    options = RunOptions(name=config.run.name, folder=config.run.folder, seed=config.run.seed, weights=config.weights,
                         probe=config.run.probe, eval_prompts=_eval_prompts(config))
    env = SingleTurn(load_function(config.env.reward, field="env.reward"), workers=config.env.workers,
                     timeout_s=config.env.timeout_s, memory_bytes=config.env.memory_bytes)
    return Run(prompts=_prompts(config.prompts), engine=_engine(config.engine, model), env=env, sampling=config.sampling.build(),
               buffer=ReplayBuffer(config.buffer, publish_every_steps=config.weights.publish_every_steps), trainer=trainer, options=options)


def processes_of(config: RunConfig) -> list[str]:
    """What the run would start beside the controller, a line each."""
    rows = ["controller: this process; prompts, buffer, ledger, versions"]
    if not isinstance(config.model, ModelFolder) or isinstance(config.warm_up, CrossEntropyWarmUp):
        rows.append("prepare: 1 child, ends before the run; model and warm-up, unless cached")
    rows.append("engine: in the controller" if isinstance(config.engine, InlineEngineConfig)
                else f"engine: 1 child, {config.engine.kind}, {config.engine.threads} thread(s)")
    rows.append(f"trainer: {config.trainer.processes} child(ren), gloo or nccl" if config.trainer.processes
                else "trainer: in the controller")
    rows.append(f"rewards: 1 zygote, {config.env.workers} worker(s)")
    return rows


def _engine(config: EngineConfig, model: Path) -> Engine:
    if isinstance(config, InlineEngineConfig):
        return InlineEngine(model, config=config)
    return TransformersEngine(model, config=config)


def _prompts(config: PromptsConfig) -> PromptSource:
    if isinstance(config, JsonlPrompts):
        return PromptSource(config.path, epochs=config.epochs)
    return PromptSource(load_function(config.function, field="prompts.function")(**config.arguments), epochs=config.epochs)


def _eval_prompts(config: RunConfig) -> tuple[Prompt, ...]:
    if not isinstance(config.eval, PromptsEval):
        return ()
    source = config.eval.prompts
    found = read_jsonl(Path(source.path), source="eval") if isinstance(source, JsonlPrompts) else \
        load_function(source.function, field="eval.prompts.function")(**source.arguments)
    return tuple(itertools.islice(found, config.eval.limit))


class Journal:
    """What a run writes while it goes on: metrics, samples, console, tracker."""

    def __init__(self, config: RunConfig, folder: Path, *, echo: Echo) -> None:
        self._config, self._folder, self._echo = config, folder, echo
        self._metrics = JsonlWriter(folder / "metrics.jsonl")
        self._samples = JsonlWriter(folder / "samples.jsonl")
        self._wandb = WandbWriter(project=config.run.wandb.project, name=config.run.name, config=config.model_dump(mode="json"),
                                  folder=folder) if isinstance(config.run.wandb, Wandb) else None
        self._rows: list[dict[str, float]] = []
        self._evaluations: dict[int, float] = {}
        self._began_s = self._wall_s = 0.0

    def begin(self) -> None:
        """The first step starts."""
        self._began_s = time.monotonic()
        self._echo(HEADER)

    def end(self) -> None:
        """The last step and its evaluation are over."""
        self._wall_s = time.monotonic() - self._began_s

    def stepped(self, report: StepReport, *, decode: Callable[[Any], str]) -> None:
        """Note one step."""
        row = {"step": report.index, "version": report.version, **report.metrics}
        self._rows.append(row)
        self._write({"trainer_step": report.index, **row})
        self._echo(step_line(report.index, report.metrics, max_staleness=self._config.buffer.max_staleness))
        if report.index % self._config.run.sample_every_steps == 1 or self._config.run.sample_every_steps == 1:
            for sample in sample_rows(report.batch.groups[0], step=report.index, decode=decode):
                self._samples.write(sample)

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Note one evaluation."""
        self._evaluations[step] = evaluation.reward_mean
        self._write({"eval_version": evaluation.version_max, "eval/reward/mean": evaluation.reward_mean,
                     "eval/errors/sum": evaluation.num_errors, **{f"eval/{source}/mean": value for source, value in evaluation.by_source.items()}})
        self._echo(f"  eval  {evaluation.reward_mean:6.3f}   held-out reward of version {evaluation.version_max}, "
                   f"{evaluation.num_rollouts} rollouts, {evaluation.num_errors} errors")

    def summary(self, run: Run) -> dict[str, Any]:
        """The contents of summary.json; the run must still be up."""
        rows, account = self._rows, run.account()
        first, last = edge_rewards(rows)
        evaluations = list(self._evaluations.values())
        return {
            "reward_first": first, "reward_last": last,
            "eval_before": evaluations[0] if evaluations else None, "eval_after": evaluations[-1] if evaluations else None,
            "steps": len(rows), "wall_s": self._wall_s,
            "rollout_tokens": account.generated.tokens, "trained_tokens": account.trained.tokens,
            "tokens_dropped": {reason: count.tokens for reason, count in account.dropped.items()},
            "staleness_max": largest_of(rows, "staleness/token/max"), "max_staleness": self._config.buffer.max_staleness,
            "depth_groups_mean": mean_of(rows, "buffer/depth/last"),
            "length_bias": rows[-1].get("buffer/length_bias/last") if rows else None,
            "rollout_tokens_per_s": total_of(rows, "rollout/tokens/sum") / self._wall_s if self._wall_s else None,
            "engine_wait_frac": mean_of(rows, "engine/wait_frac/last"), "trainer_wait_frac": mean_of(rows, "trainer/wait_frac/last"),
            "weight_sync_s_mean": mean_of(rows, "weights/sync_s/mean"), "weight_sync_density_mean": mean_of(rows, "weights/density/mean"),
            "ledger_closed": account.is_closed,
        }

    def plot(self) -> None:
        """Write reward.png."""
        steps, rewards = reward_curve(self._rows)
        plot_reward(self._folder / "reward.png", steps=steps, rewards=rewards, evaluations=self._evaluations, title=self._config.run.name)

    def close(self) -> None:
        """Close every file and tracker."""
        self._metrics.close()
        self._samples.close()
        if self._wandb:
            self._wandb.close()

    def _write(self, row: dict[str, Any]) -> None:
        self._metrics.write(row)
        if self._wandb:
            self._wandb.write(row)
