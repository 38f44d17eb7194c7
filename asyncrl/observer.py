"""What looks at the policy from beside the loop: evaluations and the parity probe, on the run's engines, outside buffer and ledger."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from asyncrl.errors import ConfigError
from asyncrl.rollout.evaluate import Evaluation, roll_out_all, summarise
from asyncrl.rollout.probe import Parity, judge, measure_parity
from asyncrl.rollout.task_config import ProbeConfig
from asyncrl.rollout.worker import RolloutWorker
from asyncrl.sync import WeightSync
from asyncrl.train.trainer import Trainer
from asyncrl.types import Prompt, Rollout

_EVAL_GROUP, _PROBE_GROUP = -1, -2


@dataclass(frozen=True, slots=True)
class Questions:
    """What an observer asks, with ids and tokens filled in."""

    evaluation: tuple[Prompt, ...]
    probe: tuple[Prompt, ...]


class Observer:
    """Asks the engines when they hold the newest published version; its rollouts are trained on by nobody.

    Args:
        worker: runs the rollouts; its ledger is not the run's.
        questions: the prompts.
        weights: says when the engines hold the newest version.
        trainer: scores what the probe got.
        probe: when, and how far engine and trainer may differ.
        timeout_s: for the rollouts of one evaluation or probe.
    """

    def __init__(self, worker: RolloutWorker, *, questions: Questions, weights: WeightSync, trainer: Trainer, probe: ProbeConfig,
                 timeout_s: float) -> None:
        self._worker, self._questions, self._weights, self._trainer, self._probe = worker, questions, weights, trainer, probe
        self._timeout_s = timeout_s
        self._probe_at = 0

    async def evaluate(self) -> Evaluation:
        """Mean reward over the held-out prompts. Waits until the engines hold the newest version; unblocked by sync.

        Raises ConfigError without prompts: a mean over nothing is no reward.
        """
        if not self._questions.evaluation:
            raise ConfigError("eval_prompts", value=(), allowed="at least one prompt to evaluate", remedy="Set RunOptions.eval_prompts.")
        await self._weights.applied()
        return summarise(await self._roll_out(self._questions.evaluation, group_id=_EVAL_GROUP))

    def probe_is_due(self, index: int) -> bool:
        """Whether the probe comes before the step after `index` steps."""
        return index >= self._probe_at

    async def roll_out_probe(self, index: int) -> tuple[int, list[Rollout]]:
        """The version the engines hold, and the probe's rollouts. Waits until it is the newest; unblocked by sync."""
        self._probe_at = index + self._probe.every_steps
        return await self._weights.applied(), await self._roll_out(self._questions.probe, group_id=_PROBE_GROUP)

    async def judge_probe(self, version: int, rollouts: SequenceOf[Rollout]) -> Parity:
        """Engine against trainer logprobs of these rollouts. Raises RunAborted with the likely cause when they differ too much."""
        parity = await measure_parity(rollouts, score=self._trainer.score, version=version)
        judge(parity, max_mean_gap=self._probe.max_mean_gap)
        return parity

    async def _roll_out(self, prompts: SequenceOf[Prompt], *, group_id: int) -> list[Rollout]:
        return await roll_out_all(self._worker, prompts, group_id=group_id, timeout_s=self._timeout_s)
