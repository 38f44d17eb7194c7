"""Runs rollouts: one prompt in, one `Rollout` out, whatever happens on the way. The one place that catches broadly, and counts."""

from __future__ import annotations

import asyncio
import traceback
from dataclasses import dataclass
from pathlib import Path

from asyncrl.accounting import Count, Ledger, RolloutKey
from asyncrl.clock import now_s
from asyncrl.errors import ChildDied, ConfigError, EngineError, NonFiniteError, RewardError, RewardTimeout, RunAborted, ShapeError, text_of
from asyncrl.records import NOTHING_WANTED, Wanted
from asyncrl.rollout.by_source import Samplings, asks_at_once, sampling_of
from asyncrl.rollout.env import Env, Outcome, Session, Waves
from asyncrl.rollout.error_budget import ErrorBudget
from asyncrl.rollout.router import Router
from asyncrl.rollout.seeds import derive_seed
from asyncrl.types import Prompt, Rollout, Sequence, Status

_OURS = Path(__file__).parents[1]
_STATUS_OF: tuple[tuple[type[Exception], Status], ...] = (
    (NonFiniteError, Status.NONFINITE_LOGPROB),
    (RewardTimeout, Status.REWARD_TIMEOUT),
    (RewardError, Status.REWARD_ERROR),
    (EngineError, Status.ENGINE_ERROR),
    (ShapeError, Status.ENGINE_ERROR),
)


@dataclass(frozen=True, slots=True)
class Requests:
    """How engines are asked."""

    deterministic: bool = False
    """What a rollout gets must not depend on what else the engine is asked. Where the requests of a group come at once, as from
    `SingleTurn`, they are sampled together; elsewhere each is sampled alone."""
    wanted: Wanted = NOTHING_WANTED
    """What the engines record of the tokens; kept sets where the sampling truncates."""


PLAIN_REQUESTS = Requests()


class RolloutWorker:
    """Runs the environment for one place of one group and turns failures into a status, never into a reward.

    Args:
        router: where completions come from.
        env: what a rollout does.
        sampling: of every completion, or by source of its prompt.
        ledger: told of every token as it arrives.
        seed: of the run; each rollout's own is derived from it, its group and its index.
        error_budget: share of the newest rollouts that may fail before the run ends, see `ErrorBudget`; None sets no limit.
        requests: how completions are asked for.
    """

    def __init__(self, router: Router, env: Env, *, sampling: Samplings, ledger: Ledger, seed: int,
                 error_budget: float | None = 0.5, requests: Requests = PLAIN_REQUESTS) -> None:
        self._router, self._env, self._sampling, self._ledger = router, env, sampling, ledger
        self._seed, self._budget = seed, None if error_budget is None else ErrorBudget(error_budget)
        self._sessions: dict[RolloutKey, Session] = {}
        self._requests = requests

    def in_flight(self) -> Count:
        """Tokens written so far by the rollouts that run now, counted from their sessions."""
        return Count(sum(session.num_tokens for session in self._sessions.values()), len(self._sessions))

    def partial(self) -> list[tuple[RolloutKey, tuple[Sequence, ...]]]:
        """What each running rollout has written so far; those without a token are left out."""
        return [(key, session.sequences()) for key, session in self._sessions.items() if session.num_tokens]

    async def run(self, prompt: Prompt, *, group_id: int, index: int) -> Rollout:
        """The finished rollout; its status says whether it failed, `error` why.

        Raises RunAborted when too many fail, ChildDied when no engine is left, ConfigError for a setting no retry mends.
        """
        key = (group_id, index, 0)
        sampling = sampling_of(self._sampling, prompt.source)
        session = Session(self._router, key=key, seed=derive_seed(self._seed, group_id, index), sampling=sampling, ledger=self._ledger,
                          waves=self._waves(prompt.source), wanted=self._requests.wanted)
        self._sessions[key] = session
        began_s, error = now_s(), ""
        try:
            try:
                outcome = _checked(await self._env.run(prompt, session))
            except (RunAborted, ChildDied, ConfigError):
                raise
            except (Exception, asyncio.CancelledError) as failure:
                if _is_cancelled(failure):
                    raise
                outcome = Outcome(next((status for kind, status in _STATUS_OF if isinstance(failure, kind)), Status.ENV_ERROR))
                error = f"{type(failure).__name__}: {text_of(failure)}\n{''.join(_places(failure))}"
            if self._budget is not None:
                self._budget.ended(outcome.status, source=prompt.source, error=error)
        except BaseException as end:
            self._ledger.abandoned(key, "end_of_run" if isinstance(end, asyncio.CancelledError) else "run_failed")
            raise
        finally:
            del self._sessions[key]
        sequences = session.sequences()
        return Rollout(prompt_id=prompt.prompt_id, group_id=group_id, index=index, source=prompt.source, status=outcome.status,
                       sequences=_without_gradient(sequences) if outcome.status.is_error else sequences, rewards=outcome.rewards,
                       sampling=sampling, generate_s=now_s() - began_s - outcome.reward_s, reward_s=outcome.reward_s, error=error)

    def _waves(self, source: str) -> Waves:
        if not self._requests.deterministic:
            return "any"
        return "group" if asks_at_once(self._env, source) else "own"


def _places(failure: BaseException) -> list[str]:
    """Where it was raised. A reward's error has the lines of the reward in its text: ours, which handed it on, would say nothing."""
    frames = traceback.extract_tb(failure.__traceback__, limit=-3)
    handed_on = isinstance(failure, RewardError)
    return traceback.format_list([frame for frame in frames if not (handed_on and Path(frame.filename).is_relative_to(_OURS))])


def _is_cancelled(failure: BaseException) -> bool:
    """Whether somebody ends this rollout. A CancelledError that the environment let out of a task of its own is its failure."""
    task = asyncio.current_task()
    return isinstance(failure, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def _checked(outcome: object) -> Outcome:
    if not isinstance(outcome, Outcome) or outcome.status is Status.INTERRUPTED:
        raise TypeError(f"Env.run returned {outcome!r}, not an Outcome of a finished rollout")
    return outcome


def _without_gradient(sequences: tuple[Sequence, ...]) -> tuple[Sequence, ...]:
    return tuple(sequence.masked() for sequence in sequences)
