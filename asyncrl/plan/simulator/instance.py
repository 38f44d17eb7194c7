"""One engine that decodes: exact between two events, at O(log c) a sequence.

n steps from c running sequences with C tokens of context take

    Σ_{i<n} ((W + κ(C + c i)) / B + t0) = n ((W + κC)/B + t0) + κ c n(n − 1) / 2B

so the time of any future step is a formula, and the step under way at any time the root of a quadratic. A sequence of L
tokens that joins at step k ends at step k + L, whatever happens meanwhile: a heap of those ends is all there is to keep.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from dataclasses import dataclass

_ROUNDING_S = 1e-9
"""A step that ends so little before a moment has not ended after it: both come from the same sums in another order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """What an engine reads and computes."""

    weight_bytes: float
    """W, read in every step."""
    kv_bytes_per_token: float
    """κ, of one token of context."""
    bandwidth_bytes_per_s: float
    """B, reached: tensor-parallel ranks × memory bandwidth × efficiency."""
    kv_pool_tokens: int
    """Context that fits."""
    prefill_s_per_token: float = 0.0
    step_overhead_s: float = 0.0
    """t0, beside the reads."""
    max_running: int = 1_000_000
    """Sequences at once; as a rule the pool is full before."""
    growth_tokens: int = 64
    """Room that must be left for each running sequence when one joins; with less they would push one another out."""


class Answer:
    """A sequence that is being written."""

    __slots__ = ("done", "end_step", "group", "length", "spans", "start_step")

    def __init__(self, group: object, length: int) -> None:
        self.group, self.length = group, length
        self.done = 0
        """Tokens written before it joined the engine it is on."""
        self.spans: list[tuple[int, int]] = []
        """(policy version, tokens), ordered."""
        self.start_step = self.end_step = 0


class Instance:
    """An engine: `step` counts what it has decoded, `clock_s` is when that step ended. It may be ahead of an event by one step."""

    __slots__ = (
        "_count",
        "_ends",
        "_mark_steps",
        "_mark_versions",
        "_running",
        "clock_s",
        "context",
        "decode_s",
        "decoder",
        "draining",
        "epoch",
        "is_down",
        "kv_tokens_read",
        "name",
        "paused_s",
        "prefill_s",
        "prompt_tokens",
        "step",
    )

    def __init__(self, name: str, decoder: Decoder, *, version: int, prompt_tokens: int) -> None:
        self.name, self.decoder, self.prompt_tokens = name, decoder, prompt_tokens
        self.clock_s, self.step, self.context = 0.0, 0, 0
        self.kv_tokens_read, self.decode_s, self.prefill_s, self.paused_s = 0, 0.0, 0.0, 0.0
        self.draining = self.is_down = False
        self.epoch = 0
        """Of the event that is planned for it; older ones are void."""
        self._ends: list[tuple[int, int, Answer]] = []
        self._running: dict[int, Answer] = {}
        self._mark_steps, self._mark_versions = [0], [version]
        self._count = 0

    @property
    def running(self) -> int:
        """c, sequences being written."""
        return len(self._running)

    @property
    def version(self) -> int:
        """What it samples with."""
        return self._mark_versions[-1]

    def has_room(self, answer: Answer) -> bool:
        """Whether the sequence may join now."""
        if self.draining or self.is_down or len(self._running) >= self.decoder.max_running:
            return False
        room = self.decoder.kv_pool_tokens - self.context - self.prompt_tokens - answer.done
        return room >= self.decoder.growth_tokens * (len(self._running) + 1) or not self._running

    def join(self, answer: Answer, *, now_s: float, prefill_tokens: float) -> None:
        """The sequence runs from the next step on; its context is computed first."""
        self.clock_s = max(self.clock_s, now_s)
        prefill_s = prefill_tokens * self.decoder.prefill_s_per_token
        self.clock_s += prefill_s
        self.prefill_s += prefill_s
        answer.start_step, answer.end_step = self.step, self.step + answer.length - answer.done
        self.context += self.prompt_tokens + answer.done
        self._count += 1
        self._running[self._count] = answer
        heapq.heappush(self._ends, (answer.end_step, self._count, answer))

    def next_event_s(self) -> float | None:
        """When the next sequence ends or the pool is full; None while nothing runs."""
        steps = self._steps_to_event()
        return None if steps is None else self.clock_s + self._duration_s(steps)

    def reach_event(self) -> list[Answer]:
        """Go to that moment. Gives the sequences that have ended; none when the pool is full."""
        steps = self._steps_to_event()
        self._decode(steps)
        ended = []
        while self._ends and (self._ends[0][1] not in self._running or self._ends[0][0] <= self.step):
            _, number, answer = heapq.heappop(self._ends)
            if self._running.pop(number, None) is not None:
                self._leave(answer)
                ended.append(answer)
        return ended

    def reach(self, now_s: float) -> None:
        """End the step that is under way at a moment; nothing for one that is ahead. An event due by then must be handled first."""
        if now_s <= self.clock_s:
            return
        if self._running:
            self._decode(min(self._steps_within(now_s - self.clock_s), self._steps_to_event()))
        self.clock_s = max(self.clock_s, now_s) if not self._running else self.clock_s

    def evict_youngest(self) -> Answer:
        """The sequence that joined last leaves with what it has, to be computed anew elsewhere."""
        _, answer = self._running.popitem()
        self._leave(answer)
        return answer

    def evict_all(self) -> list[Answer]:
        """Everything leaves, oldest first."""
        answers = list(self._running.values())
        for answer in answers:
            self._leave(answer)
        self._running.clear()
        self._ends.clear()
        return answers

    def pause(self, seconds: float) -> None:
        """Nothing is decoded for so long."""
        self.clock_s += seconds
        self.paused_s += seconds

    def recompute(self) -> int:
        """All context is computed anew; gives how many tokens that were."""
        seconds = self.context * self.decoder.prefill_s_per_token
        self.clock_s += seconds
        self.prefill_s += seconds
        return self.context

    def update(self, version: int) -> None:
        """Tokens from the next step on are written by `version`."""
        first = min((answer.start_step for answer in self._running.values()), default=self.step) if len(self._mark_steps) > 64 else 0
        keep = max(0, bisect_right(self._mark_steps, first) - 1)
        self._mark_steps, self._mark_versions = self._mark_steps[keep:], self._mark_versions[keep:]
        if self._mark_steps[-1] == self.step:
            self._mark_versions[-1] = version
        else:
            self._mark_steps.append(self.step)
            self._mark_versions.append(version)

    def _leave(self, answer: Answer) -> None:
        written = self.step - answer.start_step
        self.context -= self.prompt_tokens + answer.done + written
        answer.done += written
        at, end = answer.start_step, self.step
        mark = bisect_right(self._mark_steps, at) - 1
        while at < end:
            until = min(end, self._mark_steps[mark + 1]) if mark + 1 < len(self._mark_steps) else end
            if answer.spans and answer.spans[-1][0] == self._mark_versions[mark]:
                answer.spans[-1] = (self._mark_versions[mark], answer.spans[-1][1] + until - at)
            else:
                answer.spans.append((self._mark_versions[mark], until - at))
            at, mark = until, mark + 1

    def _steps_to_event(self) -> int | None:
        while self._ends and self._ends[0][1] not in self._running:
            heapq.heappop(self._ends)
        if not self._ends:
            return None
        return min(self._ends[0][0] - self.step, max(0, self.decoder.kv_pool_tokens - self.context) // len(self._running))

    def _decode(self, steps: int) -> None:
        seconds = self._duration_s(steps)
        running = len(self._running)
        self.kv_tokens_read += steps * self.context + running * steps * (steps - 1) // 2
        self.step += steps
        self.context += running * steps
        self.clock_s += seconds
        self.decode_s += seconds

    def _duration_s(self, steps: int) -> float:
        cost, running = self.decoder, len(self._running)
        read = cost.weight_bytes + cost.kv_bytes_per_token * (self.context + running * (steps - 1) / 2)
        return steps * (read / cost.bandwidth_bytes_per_s + cost.step_overhead_s)

    def _steps_within(self, seconds: float) -> int:
        """The first step that ends at or after `seconds`: the root of a n² + b n = seconds, rounded up."""
        cost = self.decoder
        a = cost.kv_bytes_per_token * len(self._running) / (2 * cost.bandwidth_bytes_per_s)
        b = (cost.weight_bytes + cost.kv_bytes_per_token * self.context) / cost.bandwidth_bytes_per_s + cost.step_overhead_s - a
        left = max(0.0, seconds - _ROUNDING_S)
        root = 2 * left / (b + math.sqrt(b * b + 4 * a * left))
        return math.ceil(root - 1e-12)
