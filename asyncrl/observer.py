"""What looks at the policy from beside the loop: evaluations and the parity probe, on the run's engines, outside buffer and ledger."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from asyncrl.accounting import Ledger
from asyncrl.errors import ConfigError
from asyncrl.records import NOTHING_WANTED, Wanted
from asyncrl.rollout.by_source import Samplings
from asyncrl.rollout.env import Env
from asyncrl.rollout.eval_set import EvalSet
from asyncrl.rollout.evaluate import roll_out_all
from asyncrl.rollout.evaluation import Evaluation, SetResult, summarise
from asyncrl.rollout.probe import Parity, judge, measure_parity
from asyncrl.rollout.router import Router
from asyncrl.rollout.seeds import derive_seed
from asyncrl.rollout.task_config import ProbeConfig
from asyncrl.rollout.worker import Requests, RolloutWorker
from asyncrl.sync import WeightSync
from asyncrl.train.trainer import Trainer
from asyncrl.types import Prompt, Rollout

_EVAL_GROUP, _PROBE_GROUP = -1, -2


@dataclass(frozen=True, slots=True)
class AsideRollouts:
    """Rollouts outside the buffer, made with what the run's own are made with."""

    router: Router
    env: Env
    sampling: Samplings
    seed: int
    stall_timeout_s: float
    """How long a whole evaluation, or probe, may go without a rollout that ends."""
    deterministic: bool = False

    async def roll_out(self, prompts: SequenceOf[Prompt], *, group_id: int, purpose: str = "", sampling: Samplings | None = None,
                       wanted: Wanted = NOTHING_WANTED) -> list[Rollout]:
        """One rollout a prompt, counted in no ledger. The same prompts for the same purpose have the same seeds every time."""
        worker = RolloutWorker(self.router, self.env, sampling=sampling or self.sampling, ledger=Ledger(),
                               seed=derive_seed(self.seed, purpose), error_budget=None,
                               requests=Requests(self.deterministic, wanted))
        return await roll_out_all(worker, prompts, group_id=group_id, stall_timeout_s=self.stall_timeout_s)


class Observer:
    """Asks the engines when they hold the newest published version; its rollouts are trained on by nobody.

    Args:
        aside: rolls the prompts out.
        sets: held-out sets, completed.
        probed: prompts of the parity probe.
        probe: when, and how far engine and trainer may differ.
        weights: says when the engines hold the newest version.
        trainer: scores what the probe got.
    """

    def __init__(self, aside: AsideRollouts, *, sets: SequenceOf[EvalSet], probed: SequenceOf[Prompt], probe: ProbeConfig,
                 weights: WeightSync, trainer: Trainer) -> None:
        self._aside, self._sets, self._probed, self._probe, self._weights, self._trainer = aside, sets, probed, probe, weights, trainer
        self._probe_at = 0

    async def evaluate(self) -> Evaluation:
        """Every set, one after another. Waits until the engines hold the newest version; unblocked by sync.

        Raises ConfigError without sets: a mean over nothing is no reward.
        """
        if not self._sets:
            raise ConfigError("eval_sets", value=(), allowed="at least one set to evaluate", remedy="Set RunOptions.eval_sets.")
        version = await self._weights.applied()
        return Evaluation({asked.name: await self._ask(asked) for asked in self._sets}, version=version)

    def probe_is_due(self, index: int) -> bool:
        """Whether the probe comes before the step after `index` steps."""
        return index >= self._probe_at

    async def roll_out_probe(self, index: int) -> tuple[int, list[Rollout]]:
        """The version the engines hold, and the probe's rollouts. Waits until it is the newest; unblocked by sync."""
        self._probe_at = index + self._probe.every_steps
        return await self._weights.applied(), await self._aside.roll_out(self._probed, group_id=_PROBE_GROUP,
                                                                                  wanted=self._trainer.config.wanted)

    async def judge_probe(self, version: int, rollouts: SequenceOf[Rollout]) -> Parity:
        """Engine against trainer logprobs of these rollouts. Raises RunAborted with the likely cause when they differ too much."""
        parity = await measure_parity(rollouts, score=self._trainer.score, version=version)
        judge(parity, max_mean_gap=self._probe.max_mean_gap)
        return parity

    async def _ask(self, asked: EvalSet) -> SetResult:
        prompts = [prompt for prompt in asked.prompts for _ in range(asked.samples_per_prompt)]
        return summarise(asked, await self._aside.roll_out(prompts, group_id=_EVAL_GROUP, purpose=asked.name, sampling=asked.sampling))
