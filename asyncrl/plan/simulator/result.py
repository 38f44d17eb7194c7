"""What a simulation counts, and what it tells."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

from asyncrl.plan.simulator.instance import Answer


@dataclass(slots=True)
class Tally:
    """Sums over the measured steps of what was trained on, dropped and masked."""

    steps: int = 0
    trained: int = 0
    """Answers."""
    trained_tokens: int = 0
    masked_tokens: int = 0
    dropped: int = 0
    dropped_tokens: int = 0
    trained_long: int = 0
    """Answers of more than twice the mean."""
    dropped_long: int = 0
    versions: int = 0
    """Policy versions in an answer, summed."""
    by_token: Counter[int] = field(default_factory=Counter)
    """Tokens with a gradient, by staleness."""
    by_sequence: Counter[int] = field(default_factory=Counter)
    """Answers, by the staleness of their first token."""
    over_bound: int = 0
    """Answers whose first token is staler than max_staleness."""
    step_s: list[float] = field(default_factory=list)

    def train(self, answers: list[Answer], *, version: int, oldest_trained: int, bound: int, long_tokens: float) -> None:
        """One batch, trained from `version`; tokens of versions before `oldest_trained` have no gradient."""
        self.steps += 1
        for answer in answers:
            self.trained += 1
            self.trained_tokens += answer.length
            self.trained_long += answer.length > long_tokens
            self.versions += len(answer.spans)
            first = version - answer.spans[0][0]
            self.by_sequence[first] += 1
            self.over_bound += first > bound
            for wrote, tokens in answer.spans:
                if wrote < oldest_trained:
                    self.masked_tokens += tokens
                else:
                    self.by_token[version - wrote] += tokens

    def drop(self, answers: list[Answer], *, long_tokens: float) -> None:
        """A group that was dropped."""
        for answer in answers:
            self.dropped += 1
            self.dropped_tokens += answer.length
            self.dropped_long += answer.length > long_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Of the steps after the warm-up."""

    steps: int
    seconds: float
    step_s: float
    tokens_per_s: float
    """Of answers that were trained on."""
    trainer_idle_frac: float
    engine_idle_frac: float
    """Engine time with nothing to write, dead engines included."""
    engine_paused_frac: float
    """Engine time that weight updates took, recomputed caches left out."""
    engine_prefill_frac: float
    """Prompts, and whatever is computed anew."""
    staleness_sequences: dict[int, int]
    """Answers by the staleness of their first token."""
    staleness_tokens: dict[int, int]
    """Tokens with a gradient by staleness."""
    mean_staleness: float
    """Of answers."""
    max_staleness: int
    over_bound_frac: float
    """Answers staler than `buffer.max_staleness`."""
    versions_per_sequence: float
    trained_length: float
    generated_length: float
    """Of all answers whose fate was decided."""
    length_bias: float
    """Trained over generated length."""
    generated_long_frac: float
    """Answers of more than twice the mean length."""
    trained_long_frac: float
    dropped_tokens: int
    dropped_frac: float
    """Of the tokens whose fate was decided."""
    masked_tokens: int
    reprefill_tokens: int
    """Computed anew after updates, evictions and failures."""
    preemptions: int
    failures: int

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it: keys of histograms are text."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: {str(key): count for key, count in value.items()} if isinstance(value, dict) else value
                for name, value in values.items()}


@dataclass(slots=True)
class Clocks:
    """Running sums of the engines and the trainer at one moment; the difference of two is what was between."""

    now_s: float = 0.0
    trainer_busy_s: float = 0.0
    decode_s: float = 0.0
    prefill_s: float = 0.0
    paused_s: float = 0.0
    reprefill_tokens: int = 0
    preemptions: int = 0
    failures: int = 0

    def since(self, before: Clocks) -> Clocks:
        """What has been added."""
        return Clocks(*(getattr(self, item.name) - getattr(before, item.name) for item in fields(self)))


def simulated(tally: Tally, spent: Clocks, *, engines: int) -> Simulated:
    """The numbers of a tally over the time it took."""
    decided, decided_tokens = tally.trained + tally.dropped, tally.trained_tokens + tally.dropped_tokens
    trained_length, generated_length = tally.trained_tokens / tally.trained, decided_tokens / decided
    engine_s = engines * spent.now_s
    return Simulated(
        steps=tally.steps, seconds=spent.now_s, step_s=spent.now_s / tally.steps, tokens_per_s=tally.trained_tokens / spent.now_s,
        trainer_idle_frac=1 - spent.trainer_busy_s / spent.now_s,
        engine_idle_frac=max(0.0, 1 - (spent.decode_s + spent.prefill_s + spent.paused_s) / engine_s),
        engine_paused_frac=spent.paused_s / engine_s, engine_prefill_frac=spent.prefill_s / engine_s,
        staleness_sequences=dict(sorted(tally.by_sequence.items())), staleness_tokens=dict(sorted(tally.by_token.items())),
        mean_staleness=sum(s * n for s, n in tally.by_sequence.items()) / tally.trained, max_staleness=max(tally.by_sequence),
        over_bound_frac=tally.over_bound / tally.trained, versions_per_sequence=tally.versions / tally.trained,
        trained_length=trained_length, generated_length=generated_length, length_bias=trained_length / generated_length,
        generated_long_frac=(tally.trained_long + tally.dropped_long) / decided, trained_long_frac=tally.trained_long / tally.trained,
        dropped_tokens=tally.dropped_tokens, dropped_frac=tally.dropped_tokens / decided_tokens, masked_tokens=tally.masked_tokens,
        reprefill_tokens=spent.reprefill_tokens, preemptions=spent.preemptions, failures=spent.failures)
