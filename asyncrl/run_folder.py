"""The folder of a run, `folder/name`: what it writes while it goes on, and at its end."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl.accounting import Account
from asyncrl.config import RunConfig, Wandb, dump_config
from asyncrl.loop import StepReport
from asyncrl.observe.console import Console
from asyncrl.observe.health import RunSettings
from asyncrl.observe.jsonl import JsonlWriter, rollout_rows
from asyncrl.observe.plots import plot_reward
from asyncrl.observe.summary import SUMMARY_METRICS, edge_rewards, largest_of, mean_of, reward_curve, total_of
from asyncrl.observe.wandb_writer import WandbWriter
from asyncrl.paths import claim
from asyncrl.rollout.evaluate import Evaluation


class RunFolder:
    """Everything a run writes: resolved configuration, metrics, rollouts, summary, picture; and the console and tracker beside them."""

    def __init__(self, config: RunConfig, *, console: Console) -> None:
        self.path = folder = Path(config.run.folder) / config.run.name
        self._claim = claim(folder)
        if kept := move_aside(folder):
            console.note(f"an earlier run of this name is kept as {kept}")
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        console.start(RunSettings.of(config.model_dump(mode="json")), where=f"in {folder}")
        self._config, self._console = config, console
        self._metrics = JsonlWriter(folder / "metrics.jsonl")
        self._rollouts = JsonlWriter(folder / "rollouts.jsonl")
        self._wandb: WandbWriter | None = None
        self._rows: list[dict[str, float]] = []
        self._evaluations: dict[int, float] = {}
        self._began_s: float | None = None
        self._wall_s = 0.0
        self._ended_early = ""

    def track(self) -> None:
        """Start the tracker, if there is one, and detach the console: after the reward zygote was forked, for both bring a thread."""
        self._console.detach()
        if isinstance(self._config.run.wandb, Wandb):
            self._wandb = WandbWriter(project=self._config.run.wandb.project, name=self._config.run.name,
                                      config=self._config.model_dump(mode="json"), folder=self.path)

    def begin(self) -> None:
        """The first step starts."""
        self._began_s = time.monotonic()

    def end(self) -> None:
        """The last step and its evaluation are over."""
        self._wall_s = 0.0 if self._began_s is None else time.monotonic() - self._began_s

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
        self._rows.append({name: row[name] for name in SUMMARY_METRICS if name in row})
        self._write({"trainer_step": report.index, **row})
        if (report.index - 1) % self._config.run.rollouts_every_steps == 0:
            for rollout in rollout_rows(report.batch.groups[0], step=report.index, decode=decode):
                self._rollouts.write(rollout)

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Note one evaluation."""
        self._evaluations[step] = evaluation.reward_mean
        self._write({"eval_version": evaluation.version_max, "eval/reward/mean": evaluation.reward_mean,
                     "eval/errors/sum": evaluation.num_errors,
                     **{f"eval/{source}/mean": value for source, value in evaluation.by_source.items()}})

    def summarise(self, account: Account) -> dict[str, Any]:
        """Write summary.json and reward.png, given the ledger at the end. Returns the summary."""
        summary = self._summary(account) | ({"ended_early": self._ended_early} if self._ended_early else {})
        (self.path / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        steps, rewards = reward_curve(self._rows)
        plot_reward(self.path / "reward.png", steps=steps, rewards=rewards, evaluations=self._evaluations, title=self._config.run.name)
        self._console.end(f"reward {_shown(summary['reward_first'])} → {_shown(summary['reward_last'])}, "
                          f"held-out {_shown(summary['eval_before'])} → {_shown(summary['eval_after'])}, "
                          f"{summary['steps']} steps in {summary['wall_s']:.0f} s; see {self.path}")
        return summary

    def _summary(self, account: Account) -> dict[str, Any]:
        rows = self._rows
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

    def close(self) -> None:
        """Close every file and tracker."""
        self._claim.close()
        self._metrics.close()
        self._rollouts.close()
        if self._wandb:
            self._wandb.close()
            if self._wandb.dropped:
                self._console.note(f"wandb: {self._wandb.dropped} rows were not written: {self._wandb.error}", is_warning=True)

    def _write(self, row: dict[str, Any]) -> None:
        self._metrics.write(row)
        self._console.row(row)
        if self._wandb:
            self._wandb.write(row)


def move_aside(folder: Path) -> Path | None:
    """Rename what lies at `folder` to the first free `folder.N`; None when nothing does. No run overwrites another."""
    if not folder.exists():
        return None
    kept = next(place for number in itertools.count(1) if not (place := folder.with_name(f"{folder.name}.{number}")).exists())
    return folder.rename(kept)


def _shown(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f}"
