"""What an evaluation measured: rewards, pass@k, lengths and failures of each set, stamped with the versions that answered.

Every prompt weighs the same, however many of its rollouts failed: a mean is over prompts of the mean over their valid rollouts.
Standard errors are over prompts too, so that samples of one prompt do not count as independent (Miller 2024, 2411.00640).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from asyncrl.errors import RunAborted
from asyncrl.rollout.eval_set import EvalSet
from asyncrl.types import Rollout, Status, is_success


@dataclass(frozen=True, slots=True)
class SetResult:
    """One set in one evaluation."""

    metrics: Mapping[str, float]
    """`reward/mean`, `reward/stderr`, `pass_at_4/mean` …; what was not measured is absent: a mean over nothing is no number."""
    num_rollouts: int
    num_errors: int
    """Rollouts that failed; they are in no mean."""
    versions: frozenset[int]
    """Policy versions that wrote its tokens."""
    failure: str = ""
    """Why the last of them failed."""

    @property
    def reward(self) -> float | None:
        """Mean reward; None when every rollout failed."""
        return self.metrics.get("reward/mean")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """All sets, asked once. Reads like a mapping from the name of a set to its result."""

    sets: Mapping[str, SetResult]
    version: int
    """Policy version the engines held when it began."""

    @property
    def version_min(self) -> int:
        """Oldest policy version that wrote a token; another than `version_max` only when weights arrived meanwhile."""
        return min(self._versions)

    @property
    def version_max(self) -> int:
        """Newest policy version that wrote a token."""
        return max(self._versions)

    @property
    def metrics(self) -> dict[str, float]:
        """`eval/SET/reward/mean` and so on, with `eval/version/min` and `eval/version/max`."""
        stamp = {"eval/version/min": float(self.version_min), "eval/version/max": float(self.version_max)}
        return stamp | {f"eval/{name}/{metric}": value for name, result in self.sets.items() for metric, value in result.metrics.items()}

    def __getitem__(self, name: str) -> SetResult:
        """The result of one set."""
        return self.sets[name]

    def require_scored(self) -> None:
        """Raise RunAborted, saying why, when every rollout of a set failed."""
        for name, result in self.sets.items():
            if result.reward is None:
                raise RunAborted(f"eval.sets.{name}: each of its {result.num_rollouts} rollouts failed, the last with {result.failure}")

    @property
    def _versions(self) -> frozenset[int]:
        return frozenset().union(*(result.versions for result in self.sets.values())) or frozenset({self.version})


def summarise(asked: EvalSet, rollouts: SequenceOf[Rollout]) -> SetResult:
    """The numbers of one set. `rollouts` are `samples_per_prompt` of each prompt, prompt after prompt."""
    size = asked.samples_per_prompt
    groups = [rollouts[start:start + size] for start in range(0, len(rollouts), size)]
    valid = [scored for group in groups if (scored := [rollout for rollout in group if not rollout.status.is_error])]
    failed = [rollout for rollout in rollouts if rollout.status.is_error]
    metrics = {
        **_estimate("reward", [np.mean([rollout.reward for rollout in group]) for group in valid]),
        **_estimate("completion_tokens", [np.mean([rollout.num_tokens for rollout in group]) for group in valid]),
        **_estimate("truncated_frac", [np.mean([rollout.status is Status.LENGTH for rollout in group]) for group in valid]),
        "errors/sum": float(len(failed)),
        **{f"error.{status.value}/sum": float(count) for status, count in Counter(rollout.status for rollout in failed).items()}}
    solved = [(len(group), sum(is_success(rollout.reward, success_reward=asked.success_reward) for rollout in group)) for group in valid]
    for k in asked.pass_at:
        enough = [pass_at_k(n, c, k) for n, c in solved if n >= k]
        metrics |= _estimate(f"pass_at_{k}", enough) | {f"pass_at_{k}/left_out/sum": float(len(groups) - len(enough))}
    return SetResult(metrics=metrics, num_rollouts=len(rollouts), num_errors=len(failed),
                     versions=frozenset(span.policy_version for rollout in rollouts for part in rollout.sequences for span in part.spans),
                     failure=(failed[-1].error.strip() or failed[-1].status.value) if failed else "")


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that k of n samples, c of them right, hold a right one: 1 − C(n−c, k)/C(n, k) (Chen et al. 2021, 2107.03374).

    Whole numbers up to one division, so that nothing cancels. Unbiased for the pass@k of the policy. Needs k ≤ n.
    """
    ways = math.comb(n, k)
    return (ways - math.comb(n - c, k)) / ways


def _estimate(name: str, per_prompt: SequenceOf[float]) -> dict[str, float]:
    """Mean over prompts and its standard error s/√P; a single prompt has no standard error, none has neither."""
    count = len(per_prompt)
    mean = {f"{name}/mean": float(np.mean(per_prompt))} if count else {}
    return mean | ({f"{name}/stderr": float(np.std(per_prompt, ddof=1)) / math.sqrt(count)} if count > 1 else {})
