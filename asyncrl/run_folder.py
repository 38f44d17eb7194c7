"""The folder of a run, `folder/name`: what it writes while it goes on, and at its end."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.accounting import Account
from asyncrl.best import BestWeights
from asyncrl.config import RunConfig, Wandb, dump_config
from asyncrl.errors import ConfigError
from asyncrl.observe.console import Console
from asyncrl.observe.health import RunSettings
from asyncrl.observe.jsonl import JsonlWriter, cut_jsonl, iterate_jsonl, rollout_rows
from asyncrl.observe.plots import plot_reward
from asyncrl.observe.summary import SUMMARY_METRICS, edge_rewards, largest_of, last_line, mean_of, reward_curve, total_of
from asyncrl.observe.wandb_writer import WandbWriter
from asyncrl.observe.waterfall import write_waterfall
from asyncrl.paths import claim
from asyncrl.rollout.evaluation import Evaluation
from asyncrl.rollout.task_config import KeepBest, SetsEval
from asyncrl.run_state import Resume, RunState, find_checkpoint, load_state
from asyncrl.step_report import StepReport


class RunFolder:
    """Everything a run writes: resolved configuration, metrics, rollouts, summary, picture; and the console and tracker beside them.

    A new run moves an earlier folder of its name aside. One that resumes goes on in it: what was written after the checkpoint is cut off.
    """

    def __init__(self, config: RunConfig, *, console: Console, resume: Resume = None) -> None:
        self.path = folder = Path(config.run.folder) / config.run.name
        self._config, self._console = config, console
        self._wandb: WandbWriter | None = None
        self._evaluations: dict[int, float | None] = {}
        self._best = _best_weights(config, folder)
        self._began_s: float | None = None
        self._wall_s = 0.0
        self._ended_early = ""
        self._claim = claim(folder)
        try:
            checkpoint = find_checkpoint(folder / "checkpoints", resume) if resume else None
            self.resumed = load_state(checkpoint) if checkpoint else None
            """What the run goes on from; None for a new one."""
            known = self.resumed.notes if self.resumed else {}
            self.notes = {"wandb_id": known.get("wandb_id") or uuid.uuid4().hex[:8], "config": config.model_dump(mode="json")}
            """What a run that resumes this one must find in its checkpoints."""
            rows = self._take_up(self.resumed) if self.resumed else []
            if not self.resumed and (kept := move_aside(folder)):
                console.note(f"an earlier run of this name is kept as {kept}")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
            console.start(RunSettings.of(config.model_dump(mode="json")), where=f"in {folder}")
            if rows:
                console.catch_up(rows)
            self._metrics = JsonlWriter(folder / "metrics.jsonl")
            self._rollouts = JsonlWriter(folder / "rollouts.jsonl")
        except BaseException:
            self._claim.close()
            raise

    def _take_up(self, state: RunState) -> list[dict[str, Any]]:
        """Cut what was written after the checkpoint. Gives the rows that were written before it."""
        require_same_model(state.notes.get("config", {}), self._config)
        rows = cut_jsonl(self.path / "metrics.jsonl", keep=lambda row: _is_up_to(state.index, row, "trainer_step", "eval_version"))
        cut_jsonl(self.path / "rollouts.jsonl", keep=lambda row: _is_up_to(state.index, row, "step"))
        self._evaluations = {row["eval/step/last"]: self._leading_reward(row) for row in rows if "eval_version" in row}
        self._wall_s = rows[-1]["wall_s"] if rows else 0.0
        self._console.note(f"resumed after step {state.index} of {self._config.run.steps}; "
                           f"{len(state.unfinished)} prompts that were not finished are issued again")
        if state.index >= self._config.run.steps:
            self._console.note(f"no step is left: raise run.steps = {self._config.run.steps} to train for longer", is_warning=True)
        return rows

    def track(self) -> None:
        """Start the tracker, if there is one, and detach the console: after the reward zygote was forked, for both bring a thread."""
        self._console.detach()
        if isinstance(self._config.run.wandb, Wandb):
            self._wandb = WandbWriter(project=self._config.run.wandb.project, name=self._config.run.name, run_id=self.notes["wandb_id"],
                                      config=self._config.model_dump(mode="json"), folder=self.path)

    def begin(self) -> None:
        """The first step starts."""
        self._began_s = time.monotonic() - self._wall_s

    def end(self) -> None:
        """The last step and its evaluation are over."""
        self._wall_s = self._elapsed_s()

    def ends_early(self, failure: BaseException) -> None:
        """The run fails, or is interrupted, before its last step is over."""
        self._ended_early = "interrupted" if isinstance(failure, asyncio.CancelledError) else f"{type(failure).__name__}: {failure}"
        self.end()

    def data_ended(self, steps: int) -> None:
        """The prompts did not last for all steps."""
        self._console.note(f"the prompts ended after {steps} of {self._config.run.steps} steps")

    def stepped(self, report: StepReport, *, decode: Callable[[Any], str]) -> None:
        """Note one step."""
        row = {"step": report.index, "version": report.version, **report.metrics}
        self._write({"trainer_step": report.index, **row})
        if (report.index - 1) % self._config.run.rollouts_every_steps == 0:
            for rollout in rollout_rows(report.batch.groups[0], step=report.index, decode=decode):
                self._rollouts.write(rollout)

    def was_evaluated(self, step: int) -> bool:
        """Whether there is an evaluation of this step, also one from before a resume."""
        return step in self._evaluations

    def resume_best(self, version: int) -> None:
        """Go on from the best evaluation that an earlier part of this run, up to `version`, has left."""
        if self._best is not None:
            self._best.resume(version)

    async def evaluated(self, step: int, evaluation: Evaluation, *, export: Callable[[Path], Awaitable[None]]) -> None:
        """Note one evaluation. If it is the best so far, `export` writes its weights to `best/`."""
        for name, result in evaluation.sets.items():
            if result.reward is None:
                self._console.note(f"evaluation of {name}: each of {result.num_rollouts} rollouts failed, the last with "
                                   f"{result.failure.splitlines()[0]}", is_warning=True)
        # The row comes last: a run that resumes and finds it does not evaluate this step again.
        is_best = self._best is not None and await self._best.offer(evaluation, step=step, export=export)
        self._evaluations[step] = self._leading_reward(evaluation.metrics)
        self._write({"eval_version": evaluation.version_max, "eval/step/last": step, **evaluation.metrics})
        if is_best and self._best is not None:
            self._console.note(f"the best evaluation so far: its weights are kept in {self._best.path}")

    def summarise(self, account: Account) -> dict[str, Any]:
        """Write summary.json, reward.png and the waterfall, given the ledger at the end. Returns the summary."""
        self.path.mkdir(parents=True, exist_ok=True)
        rows = self._steps()
        summary = self._summary(account, rows=rows) | ({"ended_early": self._ended_early} if self._ended_early else {})
        (self.path / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        steps, rewards = reward_curve(rows)
        evaluations = {step: reward for step, reward in self._evaluations.items() if reward is not None}
        plot_reward(self.path / "reward.png", steps=steps, rewards=rewards, evaluations=evaluations, title=self._config.run.name)
        write_waterfall(self.path, title=self._config.run.name)
        self._console.end(last_line(summary, place=str(self.path)))
        return summary

    def _steps(self) -> list[dict[str, float]]:
        """What the summary needs of each step, from the file: held in memory, it would grow with every step."""
        return [{name: row[name] for name in SUMMARY_METRICS if row.get(name) is not None}
                for row in iterate_jsonl(self.path / "metrics.jsonl") if "trainer_step" in row]

    def _summary(self, account: Account, *, rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
        first, last = edge_rewards(rows)
        evaluations = [reward for reward in self._evaluations.values() if reward is not None]
        return {
            "reward_first": first, "reward_last": last,
            "eval_before": evaluations[0] if evaluations else None, "eval_after": evaluations[-1] if evaluations else None,
            "best_step": self._best.step if self._best else None, "best_reward": self._best.reward if self._best else None,
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

    def close(self) -> None:
        """Close every file and tracker; only then another run may have the folder."""
        with self._claim:
            self._metrics.close()
            self._rollouts.close()
            if self._wandb:
                self._wandb.close()
                if self._wandb.dropped:
                    self._console.note(f"wandb: {self._wandb.dropped} rows were not written: {self._wandb.error}", is_warning=True)

    def _leading_reward(self, row: Mapping[str, Any]) -> float | None:
        """The reward of the set that stands for all, in the metrics of an evaluation."""
        return row.get(f"eval/{self._config.eval.leading}/reward/mean") if isinstance(self._config.eval, SetsEval) else None

    def _elapsed_s(self) -> float:
        """Since the first step, without the time between two processes of a resumed run."""
        return self._wall_s if self._began_s is None else time.monotonic() - self._began_s

    def _write(self, row: dict[str, Any]) -> None:
        row["wall_s"] = self._elapsed_s()
        self._metrics.write(row)
        self._console.row(row)
        if self._wandb:
            self._wandb.write(row)


def _is_up_to(index: int, row: Mapping[str, Any], *names: str) -> bool:
    """Whether a row, by the first of these fields it has, is of the first `index` steps. What has none is no row of ours."""
    step = next((row[name] for name in names if name in row), None)
    return isinstance(step, int) and step <= index


def move_aside(folder: Path) -> Path | None:
    """Rename what lies at `folder` to the first free `folder.N`; None when nothing does. No run overwrites another."""
    if not folder.exists():
        return None
    kept = next(place for number in itertools.count(1) if not (place := folder.with_name(f"{folder.name}.{number}")).exists())
    return folder.rename(kept)


def _best_weights(config: RunConfig, folder: Path) -> BestWeights | None:
    if not isinstance(config.eval, SetsEval) or not isinstance(config.eval.best, KeepBest):
        return None
    return BestWeights(folder, set_name=config.eval.leading, metric=config.eval.best.metric)


def require_same_model(saved: Mapping[str, Any], config: RunConfig) -> None:
    """Raise ConfigError when a run would go on with the weights of another model."""
    given = config.model_dump(mode="json", include={"model", "warm_up"})
    for section, value in given.items():
        if section in saved and saved[section] != value:
            raise ConfigError(section, value=value, allowed=f"what the run began with, {saved[section]}",
                              remedy="Resume with that, or begin a new run under another run.name.")
