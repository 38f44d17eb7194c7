"""Environments talk to the policy in tokens; the session records every token as it comes and never re-tokenises."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncrl.accounting import Ledger, RolloutKey
from asyncrl.clock import now_s
from asyncrl.errors import ChildDied, ConfigError, EngineError, NonFiniteError, RewardError, ShapeError
from asyncrl.records import NOTHING_WANTED, Wanted
from asyncrl.rollout.engine import Chunk, GenerationRequest
from asyncrl.rollout.reward import RewardPool
from asyncrl.rollout.router import Router
from asyncrl.rollout.seeds import derive_seed
from asyncrl.tokenizer import Tokenizer
from asyncrl.types import LARGEST_REWARD, Prompt, Sampling, Sequence, SequenceBuilder, Status

Waves = Literal["any", "group", "own"]
"""With whom a bit-reproducible engine samples a request: with whatever waits, with its group, alone."""


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """What the policy wrote in answer to one `Session.generate`."""

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    finish: Status


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an environment reports at the end of a rollout. Raises RewardError for one that ended well and earned no finite number."""

    status: Status
    rewards: Mapping[str, float] = field(default_factory=dict)
    """By name; their sum is the reward. Needed unless the status is an error."""
    reward_s: float = 0.0

    def __post_init__(self) -> None:
        if self.status.is_error:
            return
        if not self.rewards:
            raise RewardError(f"an outcome with status {self.status.value} has no reward: no reward is not a reward of 0")
        bad = [f"{name} = {value!r}" for name, value in self.rewards.items() if not _is_finite_number(value)]
        if bad:
            raise RewardError(f"each reward of an outcome must be one finite number, in float32, got {', '.join(bad)}")


class Session:
    """The policy as one rollout sees it. Records tokens, logprobs and versions of every turn.

    `generate(tokens)` takes the whole history as token ids. Where it extends what is recorded, the new tokens are noted as
    given; where it contradicts it (a template that rewrites history), a new sequence starts and the fork is counted.
    """

    def __init__(self, router: Router, *, key: RolloutKey, seed: int, sampling: Sampling, ledger: Ledger,
                 waves: Waves = "any", wanted: Wanted = NOTHING_WANTED) -> None:
        self.key, self.sampling, self._waves = key, sampling, waves
        self._wanted = dataclasses.replace(wanted, kept_sets=wanted.kept_sets and sampling.truncates)
        self._router, self._seed, self._ledger = router, seed, ledger
        self._done: list[Sequence] = []
        self._builder: SequenceBuilder | None = None
        self._turn = 0
        self._requests = 0
        ledger.generated(key, 0)

    @property
    def forks(self) -> int:
        """How often history was rewritten."""
        return len(self._done)

    @property
    def num_tokens(self) -> int:
        """Tokens the policy has written so far."""
        return sum(sequence.num_sampled_tokens for sequence in self._done) + (self._builder.num_sampled_tokens if self._builder else 0)

    def sequences(self) -> tuple[Sequence, ...]:
        """Everything recorded so far, checked."""
        return (*self._done, self._builder.build()) if self._builder else tuple(self._done)

    async def generate(self, tokens: SequenceOf[int], sampling: Sampling | None = None) -> Turn:
        """One completion after `tokens`. Survives interruption: prefix, remaining budget and versions carry over.

        `sampling` may have another budget and other stop strings than the run's. Raises ConfigError when it differs otherwise,
        EngineError when the engine refuses, NonFiniteError for a broken logprob, ChildDied when no engine is left; `finish`
        PROMPT_TOO_LONG when the context has no room for a single token.
        """
        sampling = self._allowed(sampling or self.sampling)
        builder = self._open(tokens)
        start = len(builder)
        budget = min(sampling.max_new_tokens, self._router.context_tokens - start)
        if budget < 1:
            return Turn(np.zeros(0, np.int32), np.zeros(0, np.float32), Status.PROMPT_TOO_LONG)
        finish: Status | None = None
        while finish in (None, Status.INTERRUPTED):
            left = budget - (len(builder) - start)
            finish = Status.LENGTH if left <= 0 else await self._stream(
                builder, dataclasses.replace(sampling, max_new_tokens=left), is_resubmitted=finish is Status.INTERRUPTED)
        self._turn += 1
        written = builder.build()
        return Turn(written.tokens[start:], written.rollout_logprobs[start:], finish or Status.LENGTH)

    async def _stream(self, builder: SequenceBuilder, sampling: Sampling, *, is_resubmitted: bool) -> Status:
        request_id = ".".join(map(str, (*self.key, self._requests)))
        wave = {"any": None, "group": str(self.key[0]), "own": request_id}[self._waves]
        request = GenerationRequest(request_id=request_id, tokens=builder.tokens, sampling=sampling,
                                    seed=derive_seed(self._seed, self._requests), wave=wave, wanted=self._wanted,
                                    is_resubmitted=is_resubmitted)
        self._requests += 1
        written = 0
        try:
            async with aclosing(self._router.generate(request)) as chunks:
                async for chunk in chunks:
                    written += len(chunk.tokens)
                    if written > sampling.max_new_tokens:
                        raise EngineError(f"request {request.request_id}: engine wrote {written} tokens, budget {sampling.max_new_tokens}")
                    self._record(builder, chunk)
                    if chunk.finish is not None:
                        return chunk.finish
        except NonFiniteError as error:
            raise NonFiniteError(f"request {request.request_id}: {error}") from error
        except ShapeError as error:
            raise EngineError(f"request {request.request_id}: {error}") from error
        except ChildDied as error:
            if not self._router.has_hope:
                raise
            if sampling.stop and written:
                raise EngineError(f"request {request.request_id}: its engine died, and another one would look for the stop strings "
                                  f"{sampling.stop} in what it writes itself alone: {error}") from error
            return Status.INTERRUPTED
        raise EngineError(f"request {request.request_id}: the engine's stream ended without a finish reason")

    def _record(self, builder: SequenceBuilder, chunk: Chunk) -> None:
        if chunk.finish is Status.NONFINITE_LOGPROB:
            return
        if len(chunk.tokens) and ((self._wanted.kept_sets and chunk.records.kept is None)
                                  or (self._wanted.routed_experts and chunk.records.experts is None)):
            raise EngineError(f"the engine recorded {chunk.records.arrays().keys() or 'nothing'} of its tokens, wanted: {self._wanted}")
        builder.sampled(chunk.tokens, logprobs=chunk.logprobs, policy_version=chunk.policy_version, kv_fresh=chunk.kv_fresh,
                        turn=self._turn, records=chunk.records)
        self._ledger.generated(self.key, len(chunk.tokens))

    def _allowed(self, sampling: Sampling) -> Sampling:
        run = dataclasses.replace(self.sampling, max_new_tokens=sampling.max_new_tokens, stop=sampling.stop)
        if sampling != run:
            raise ConfigError("Session.generate(sampling)", value=sampling, allowed="the run's sampling, but for max_new_tokens and stop",
                              remedy="The trainer computes logprobs under the run's sampling; change it there.")
        return sampling

    def _open(self, tokens: SequenceOf[int]) -> SequenceBuilder:
        history = np.asarray(tokens, dtype=np.int32)
        if self._builder is not None:
            known = self._builder.tokens
            if np.array_equal(history[:len(known)], known):
                self._builder.given(history[len(known):], turn=self._turn)
                return self._builder
            self._done.append(self._builder.build())
        self._builder = SequenceBuilder(history)
        return self._builder


class Env(Protocol):
    """What a rollout does between prompt and outcome."""

    def start(self, logs: Path, tokenizer: Tokenizer) -> None:
        """Called once before anything else runs, so that forked workers inherit the user's functions."""

    async def run(self, prompt: Prompt, session: Session) -> Outcome:
        """One rollout. Raises RewardError, RewardTimeout or whatever the environment fails with; the worker counts it."""

    async def close(self) -> None:
        """Ends every worker."""


class SingleTurn:
    """One completion, judged by a reward: any callable, closures included, run in killable workers.

    Args:
        reward: `f(prompt: Prompt, completion: str) -> float`, or TRL's `f(prompts, completions, **columns) -> list[float]`;
            several as a mapping from name to function, summed.
        workers: reward processes.
        timeout_s: deadline of one call of a reward function; the worker that misses it is killed and replaced.
    """

    def __init__(self, reward: Callable[..., object] | Mapping[str, Callable[..., object]], *, workers: int = 1,
                 timeout_s: float = 10.0, memory_bytes: int | None = None) -> None:
        functions = reward if isinstance(reward, Mapping) else [reward]
        self._pool = RewardPool(functions, workers=workers, timeout_s=timeout_s, memory_bytes=memory_bytes)
        self._tokenizer: Tokenizer | None = None

    def start(self, logs: Path, tokenizer: Tokenizer) -> None:
        """Fork the reward zygote."""
        self.start_together([self], logs, tokenizer)

    @staticmethod
    def start_together(envs: SequenceOf[SingleTurn], logs: Path, tokenizer: Tokenizer) -> None:
        """Fork one reward zygote for several of them, which are closed together."""
        if envs:
            RewardPool.start_together([env._pool for env in envs], logs)
        for env in envs:
            env._tokenizer = tokenizer

    async def run(self, prompt: Prompt, session: Session) -> Outcome:
        """Write one completion and judge it."""
        assert self._tokenizer is not None, "start() comes first"
        turn = await session.generate(prompt.tokens)
        if turn.finish.is_error:
            return Outcome(turn.finish)
        began_s = now_s()
        rewards = await self._pool.score(prompt, self._tokenizer.decode(turn.tokens), turn.tokens.tolist())
        return Outcome(turn.finish, rewards, now_s() - began_s)

    async def close(self) -> None:
        """End the reward workers."""
        await self._pool.close()


def _is_finite_number(value: object) -> bool:
    return isinstance(value, int | float | np.number) and bool(abs(value) <= LARGEST_REWARD)
