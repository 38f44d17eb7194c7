"""The data that flows round the loop: prompts in, tagged token sequences out. Frozen, NumPy only.

Index t of every per-token array speaks of token t. The shift to "logits at t predict token t + 1" happens in
`asyncrl.train` alone.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError, NonFiniteError, ShapeError
from asyncrl.records import NOTHING, RecordsBuilder, TokenRecords

NOT_SAMPLED = -1
"""Policy version of a token the policy did not sample (prompt, environment, framework)."""


KEPT_SET_FIELDS = ("top_p", "top_k", "min_p")
"""Fields of `Sampling` that leave the likeliest tokens and renormalise over them."""

LARGEST_REWARD = float(np.finfo(np.float32).max)
"""Rewards are float32 in a batch: a number beyond it would be infinity there."""

_REWARD_ROUNDING = 1e-9
"""So that 0.7 + 0.2 + 0.1 reaches 1."""


def is_success(reward: float, *, success_reward: float) -> bool:
    """Whether a reward, a sum of rewards by name, is at least `success_reward`, but for rounding."""
    return reward >= success_reward - _REWARD_ROUNDING


class Status(enum.Enum):
    """How a rollout, or one completion of it, ended. Baseline, mask, metrics and retry all read this."""

    STOP = "stop"
    """An end-of-sequence token was sampled."""
    LENGTH = "length"
    """The token budget or the context ran out."""
    INTERRUPTED = "interrupted"
    """Ended by a pause; the session sends the prefix again. Never the status of a finished rollout."""
    PROMPT_TOO_LONG = "prompt_too_long"
    NONFINITE_LOGPROB = "nonfinite_logprob"
    ENGINE_ERROR = "engine_error"
    ENV_ERROR = "env_error"
    REWARD_ERROR = "reward_error"
    REWARD_TIMEOUT = "reward_timeout"

    @property
    def is_error(self) -> bool:
        """Whether the rollout stays out of the group's baseline and carries no gradient."""
        return self not in (Status.STOP, Status.LENGTH)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One task, given as text, tokens or messages. `columns` reach the reward."""

    text: str = ""
    """Filled by the prompt source when empty: `messages` by the model's chat template, else `tokens` decoded."""
    tokens: tuple[int, ...] = ()
    """Token ids; filled from `text` by the prompt source when empty."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    source: str = "train"
    """Which data set it comes from; metrics are kept per source."""
    prompt_id: str = ""
    """Unique in the run; filled by the prompt source when empty."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """A conversation, `{"role": ..., "content": ...}` each, whose next message the policy writes; empty for plain text."""
    row: int | None = None
    """Its place in its data set, the same in every epoch; filled by the prompt source."""

    def to_wire(self) -> dict[str, Any]:
        """A form msgpack can carry, if it can carry the columns; `from_wire` gives the prompt back. Tuples in columns become lists."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return fields | {"columns": dict(self.columns), "messages": [dict(message) for message in self.messages]}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Prompt:
        """The prompt that `to_wire` described."""
        return cls(**{**wire, "tokens": tuple(wire["tokens"]), "messages": tuple(wire["messages"])})


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a completion is sampled. Every field is sent with every request: no engine default applies.

    Training accepts temperature, and of what else reshapes the distribution the kept sets of `top_p`, `top_k` and `min_p`, where the
    engine records them: without the set each ratio would be off by the kept mass.
    """

    temperature: float = 1.0
    max_new_tokens: int = 256
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    min_new_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    """Stop strings; needs an engine with the `stop_strings` capability."""

    def biased_fields(self) -> tuple[str, ...]:
        """Names of the fields that make the sampled distribution differ from softmax(logits / temperature)."""
        neutral = {f.name: f.default for f in dataclasses.fields(self) if f.name not in ("temperature", "max_new_tokens", "stop")}
        return tuple(name for name, default in neutral.items() if getattr(self, name) != default)

    @property
    def truncates(self) -> bool:
        """Whether `top_p`, `top_k` or `min_p` may leave tokens out."""
        return any(name in KEPT_SET_FIELDS for name in self.biased_fields())

    def check(self, *, for_training: bool, kept_sets: bool = False) -> None:
        """Raise ConfigError unless the values are in range and, for training, leave the distribution whole, or leave sets of it that
        are recorded: `kept_sets` says whether the engine does."""
        if not self.temperature > 0.0:
            raise ConfigError("sampling.temperature", value=self.temperature, allowed="a number above 0",
                              remedy="Logprobs of greedy decoding are not defined; use a small temperature such as 0.01.")
        if self.max_new_tokens < 1:
            raise ConfigError("sampling.max_new_tokens", value=self.max_new_tokens, allowed="an integer of at least 1",
                              remedy="Set how many tokens a completion may have.")
        for name, is_right, allowed in (("top_p", 0 < self.top_p <= 1, "a share above 0, at most 1"),
                                        ("top_k", self.top_k is None or self.top_k >= 1, "an integer of at least 1, or None"),
                                        ("min_p", 0 <= self.min_p <= 1, "a share between 0 and 1")):
            if not is_right:
                raise ConfigError(f"sampling.{name}", value=getattr(self, name), allowed=allowed, remedy="Change it, or leave it out.")
        if for_training:
            self._check_that_ratios_hold(kept_sets=kept_sets)

    def _check_that_ratios_hold(self, *, kept_sets: bool) -> None:
        for name in self.biased_fields():
            if name in KEPT_SET_FIELDS and not kept_sets:
                raise ConfigError(f"sampling.{name}", value=getattr(self, name),
                                  allowed="the neutral value alone, when the completions are trained on and the engine does not record "
                                          "the kept sets",
                                  remedy="It renormalises the sampled distribution over a kept set, so every importance ratio would be "
                                         "off by the kept mass. Take engine.kind transformers or inline, which record the sets, or "
                                         "remove it (temperature is fine).")
            if name not in KEPT_SET_FIELDS:
                raise ConfigError(f"sampling.{name}", value=getattr(self, name),
                                  allowed="the neutral value alone, when the completions are trained on",
                                  remedy="It reshapes the sampled distribution in a way the trainer does not know; remove it "
                                         "(temperature is fine).")


@dataclass(frozen=True, slots=True)
class Span:
    """Sampled tokens [start, end) that one policy version wrote."""

    start: int
    end: int
    policy_version: int
    kv_fresh: bool = True
    """False where the keys and values of earlier tokens come from an older version (`keep` interruption)."""


@dataclass(frozen=True, slots=True, eq=False)
class Sequence:
    """One row of tokens. Build it with `SequenceBuilder`; `check()` holds for every one that was built so."""

    tokens: NDArray[np.int32]
    """[T]"""
    loss_mask: NDArray[np.bool_]
    """[T], sampled by the policy and trainable."""
    rollout_logprobs: NDArray[np.float32]
    """[T], of the distribution sampled from; 0 where not sampled."""
    turn_ids: NDArray[np.int16]
    """[T], -1 for the prompt, then the number of the turn."""
    spans: tuple[Span, ...]
    """Run-length policy versions over the sampled tokens, ordered, without overlap."""
    records: TokenRecords = NOTHING
    """What the engine recorded of the tokens for the trainer's forward."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def policy_versions(self) -> NDArray[np.int32]:
        """[T] version that sampled each token, `NOT_SAMPLED` elsewhere."""
        versions = np.full(len(self), NOT_SAMPLED, dtype=np.int32)
        for span in self.spans:
            versions[span.start:span.end] = span.policy_version
        return versions

    @property
    def num_sampled_tokens(self) -> int:
        """How many of the tokens the policy sampled."""
        return sum(span.end - span.start for span in self.spans)

    @property
    def first_version(self) -> int:
        """Version of the first sampled token, `NOT_SAMPLED` when there is none."""
        return self.spans[0].policy_version if self.spans else NOT_SAMPLED

    def masked(self) -> Sequence:
        """The same tokens without any gradient."""
        return dataclasses.replace(self, loss_mask=np.zeros(len(self), dtype=np.bool_))

    def check(self) -> None:
        """Raise ShapeError or NonFiniteError unless all arrays agree on T, spans tile the sampled tokens, logprobs are finite."""
        lengths = {name: len(getattr(self, name)) for name in ("tokens", "loss_mask", "rollout_logprobs", "turn_ids")}
        if len(set(lengths.values())) != 1:
            raise ShapeError(f"per-token arrays of one sequence must have one length, got {lengths}")
        self.records.check(self.tokens)
        end = 0
        for span in self.spans:
            if not end <= span.start < span.end <= len(self) or span.policy_version < 0:
                raise ShapeError(f"spans must be ordered, disjoint, non-empty, inside [0, {len(self)}), version >= 0; got {self.spans}")
            end = span.end
        if bool(np.any(self.loss_mask & (self.policy_versions == NOT_SAMPLED))):
            raise ShapeError("loss_mask is set at a token that no policy version sampled")
        bad = np.flatnonzero(~np.isfinite(self.rollout_logprobs))
        if len(bad):
            raise NonFiniteError(f"rollout_logprobs[{bad[0]}] = {self.rollout_logprobs[bad[0]]}: every logprob must be finite")


class SequenceBuilder:
    """Appends tokens, never edits them: the one way a Sequence comes into being."""

    def __init__(self, prompt_tokens: Iterable[int]) -> None:
        self._tokens: list[NDArray[np.int32]] = []
        self._logprobs: list[NDArray[np.float32]] = []
        self._mask: list[NDArray[np.bool_]] = []
        self._turns: list[NDArray[np.int16]] = []
        self._spans: list[Span] = []
        self._records = RecordsBuilder()
        self._length = 0
        self._append(np.asarray(tuple(prompt_tokens), dtype=np.int32), None, turn=-1, trainable=False)

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> NDArray[np.int32]:
        """[T] all tokens so far."""
        return np.concatenate(self._tokens)

    @property
    def num_sampled_tokens(self) -> int:
        """How many of them the policy sampled."""
        return sum(span.end - span.start for span in self._spans)

    def sampled(self, tokens: NDArray[np.int32], *, logprobs: NDArray[np.float32], policy_version: int,
                kv_fresh: bool, turn: int, records: TokenRecords = NOTHING) -> None:
        """Append tokens the policy sampled, [n] int32 with [n] float32 logprobs; `records` as `RecordsBuilder.add` takes them.

        Raises ShapeError, NonFiniteError.
        """
        if logprobs is None or len(tokens) != len(logprobs):
            got = None if logprobs is None else len(logprobs)
            raise ShapeError(f"{len(tokens)} sampled tokens came with {got} logprobs; each needs one")
        values = np.asarray(logprobs, dtype=np.float32)
        bad = np.flatnonzero(~np.isfinite(values))
        if len(bad):
            raise NonFiniteError(f"logprob {values[bad[0]]} of sampled token {self._length + int(bad[0])}: the whole logit row is broken")
        if not len(tokens):
            return
        start = self._length
        self._records.add(records, np.asarray(tokens, dtype=np.int32), start=start)
        self._append(np.asarray(tokens, dtype=np.int32), values, turn=turn, trainable=True)
        last = self._spans[-1] if self._spans else None
        if last and last.end == start and (last.policy_version, last.kv_fresh) == (policy_version, kv_fresh):
            self._spans[-1] = dataclasses.replace(last, end=self._length)
        else:
            self._spans.append(Span(start, self._length, policy_version, kv_fresh))

    def given(self, tokens: Iterable[int], *, turn: int) -> None:
        """Append tokens the policy did not sample (environment, template, framework): no ratio, no gradient."""
        self._append(np.asarray(tuple(tokens), dtype=np.int32), None, turn=turn, trainable=False)

    def build(self) -> Sequence:
        """The checked, frozen sequence."""
        sequence = Sequence(tokens=self.tokens, loss_mask=np.concatenate(self._mask), rollout_logprobs=np.concatenate(self._logprobs),
                            turn_ids=np.concatenate(self._turns), spans=tuple(self._spans), records=self._records.build(self._length))
        sequence.check()
        return sequence

    def _append(self, tokens: NDArray[np.int32], logprobs: NDArray[np.float32] | None, *, turn: int, trainable: bool) -> None:
        self._tokens.append(tokens)
        self._logprobs.append(np.zeros(len(tokens), np.float32) if logprobs is None else logprobs)
        self._mask.append(np.full(len(tokens), trainable, np.bool_))
        self._turns.append(np.full(len(tokens), turn, np.int16))
        self._length += len(tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """One attempt at a prompt: what was written, how it ended, what it earned. Its weight in the baseline is 1."""

    prompt_id: str
    group_id: int
    index: int
    """Place in the group, 0 … group_size − 1."""
    sequences: tuple[Sequence, ...]
    status: Status
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Reward by name; empty when the status is an error."""
    source: str = "train"
    attempt: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    generate_s: float = 0.0
    reward_s: float = 0.0
    error: str = ""
    """Text of the failure, for people."""

    @property
    def reward(self) -> float:
        """Sum of the named rewards; NaN for an error status."""
        return float("nan") if self.status.is_error else float(sum(self.rewards.values()))

    @property
    def num_tokens(self) -> int:
        """Sampled tokens of all sequences."""
        return sum(sequence.num_sampled_tokens for sequence in self.sequences)

    @property
    def first_version(self) -> int:
        """Version that sampled the first token: what the staleness of a rollout is counted from."""
        versions = [s.first_version for s in self.sequences if s.spans]
        return min(versions, default=NOT_SAMPLED)


@dataclass(frozen=True, slots=True, eq=False)
class RolloutGroup:
    """All rollouts of one prompt in one admission; baselines are taken over `rollouts` without error."""

    group_id: int
    prompt: Prompt
    rollouts: tuple[Rollout, ...]

    @property
    def num_tokens(self) -> int:
        """Sampled tokens of all rollouts."""
        return sum(rollout.num_tokens for rollout in self.rollouts)

    @property
    def first_version(self) -> int:
        """Oldest version among the first tokens of its rollouts, `NOT_SAMPLED` when nothing was sampled."""
        return min((r.first_version for r in self.rollouts if r.first_version != NOT_SAMPLED), default=NOT_SAMPLED)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """What one step trains on: whole groups, in admission order."""

    version: int
    """Policy version the step trains from; the step makes version + 1."""
    groups: tuple[RolloutGroup, ...]

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        """All rollouts, group after group."""
        return tuple(rollout for group in self.groups for rollout in group.rollouts)
