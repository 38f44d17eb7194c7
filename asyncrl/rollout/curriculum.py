"""Which prompts are worth asking: pass rates by row of the data, verdicts that expire."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from asyncrl.rollout.data_config import PassRateCurriculum
from asyncrl.types import is_success

Verdict = Literal["solved", "hopeless"]

_PASSES_A_VERDICT_HOLDS = 4


class PassRates:
    """The newest outcomes of each row and, where they are too uniform, since when it has not been asked.

    Time is counted in prompts that the source has handed out. The same observations at the same times lead to the same verdicts.
    """

    def __init__(self, config: PassRateCurriculum) -> None:
        self._config = config
        self._outcomes: dict[int, str] = {}
        self._judged_at: dict[int, int] = {}
        self._void_until = -1

    def observe(self, row: int, reward: float, *, asked: int) -> None:
        """A rollout without error got this reward."""
        outcomes = self._outcomes.get(row, "") + str(int(is_success(reward, success_reward=self._config.success_reward)))
        self._outcomes[row] = outcomes = outcomes[-self._config.min_rollouts:]
        if self._judge(outcomes) is None:
            self._judged_at.pop(row, None)
        else:
            self._judged_at.setdefault(row, asked)

    def verdict(self, row: int) -> Verdict | None:
        """Why the row is not worth asking; None when it is, or not enough is known. An expired verdict is still one."""
        return self._judge(self._outcomes.get(row, ""))

    def has_expired(self, row: int, *, asked: int, rows: int | None) -> bool:
        """Whether the verdict on a row is old enough to be looked at again. One that other settings brought counts from now."""
        judged_at = self._judged_at.setdefault(row, asked)
        holds = self._config.recheck_after_prompts or _PASSES_A_VERDICT_HOLDS * (rows or 0)
        return judged_at <= self._void_until or asked - judged_at >= holds

    def forget(self, row: int) -> None:
        """Judge it anew, by rollouts still to come."""
        self._outcomes.pop(row, None)
        self._judged_at.pop(row, None)

    def void(self, *, asked: int) -> None:
        """All verdicts of up to now have expired."""
        self._void_until = asked

    def state(self) -> dict[str, Any]:
        """Everything observed, as JSON can hold it."""
        return {"rows": list(self._outcomes), "outcomes": list(self._outcomes.values()), "void_until": self._void_until,
                "judged": [[row, at] for row, at in self._judged_at.items()]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` gave. Verdicts follow the settings of now."""
        self._outcomes = dict(zip(state["rows"], state["outcomes"], strict=True))
        self._judged_at = {row: at for row, at in state["judged"]}
        self._void_until = state["void_until"]

    def _judge(self, outcomes: str) -> Verdict | None:
        if len(outcomes) < self._config.min_rollouts:
            return None
        rate, solved, hopeless = outcomes.count("1") / len(outcomes), self._config.solved_above, self._config.hopeless_below
        if solved is not None and rate >= solved:
            return "solved"
        return "hopeless" if hopeless is not None and rate <= hopeless else None
