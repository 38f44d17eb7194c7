"""What healthy values look like: the one table that the console prints, marks by, warns by, and that docs/metrics.md shows."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WIDTH = 80
"""Columns of everything that is printed as plain lines."""


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What a reader of metrics must know of the configuration."""

    name: str
    steps: int
    max_staleness: int
    """K."""
    staleness_bound: float
    """Largest staleness of a token; infinite where K bounds the mean alone."""
    group_size: int
    probe_limit: float
    """Mean gap at which the parity probe ends the run, in nats."""

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> RunSettings:
        """From a configuration as a plain tree, which is what `config.yaml` holds. Raises KeyError, TypeError or ValueError."""
        run, buffer = tree["run"], tree["buffer"]
        max_staleness = int(buffer["max_staleness"])
        return cls(name=str(run["name"]), steps=int(run["steps"]), max_staleness=max_staleness, group_size=int(buffer["group_size"]),
                   staleness_bound=_staleness_bound(buffer["policy"], max_staleness=max_staleness),
                   probe_limit=float(run["probe"]["max_mean_gap"]))


def _staleness_bound(policy: Mapping[str, Any], *, max_staleness: int) -> float:
    """What no token that leaves the buffer may exceed; a token that is only masked leaves it too."""
    if policy["kind"] in ("soft", "token_mask"):
        return math.inf
    return float(policy.get("cut_staleness", max_staleness))


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number the console shows, and what is known about it. Bounds are inclusive; None: no bound."""

    title: str
    metric: str
    meaning: str
    remedy: str
    """What to do when it is outside."""
    below: str = ""
    """Likely causes of a value that is too low, for the warning."""
    above: str = ""
    """Of one that is too high."""
    low: float | None = None
    high: float | str | None = None
    """Or the name of a field of `RunSettings`."""
    high_share: float = 1.0
    """Of a bound that is a setting, the share that is still healthy."""
    patience_steps: int = 3
    """So many measurements in a row must be outside before it is worth a warning; the mark is there from the first."""

    def bounds(self, settings: RunSettings) -> tuple[float, float]:
        """The healthy range; infinite where there is no bound."""
        high = getattr(settings, self.high) if isinstance(self.high, str) else self.high
        return (-math.inf if self.low is None else self.low, math.inf if high is None else high * self.high_share)

    def is_healthy(self, value: float, settings: RunSettings) -> bool:
        """Whether the value lies in the range. NaN and infinity never do."""
        low, high = self.bounds(settings)
        return math.isfinite(value) and low <= value <= high

    def range_text(self, settings: RunSettings) -> str:
        """The range in words, a dash when there is none."""
        low, high = self.bounds(settings)
        return _range_text(*("" if math.isinf(bound) else f"{bound:.3g}" for bound in (low, high)))

    def cause_text(self, value: float, settings: RunSettings) -> str:
        """Likely causes of a value that lies outside; empty where none are known."""
        low, high = self.bounds(settings)
        return self.below if value < low else self.above if value > high else ""

    def rule_text(self) -> str:
        """The range in words for any run."""
        share = "" if self.high_share == 1 else f"{self.high_share:g} · "
        high = f"{share}{self.high}" if isinstance(self.high, str) else "" if self.high is None else f"{self.high:g}"
        return _range_text("" if self.low is None else f"{self.low:g}", high)


def _range_text(low: str, high: str) -> str:
    if not low and not high:
        return "-"
    if low == high:
        return low
    return f"{low} to {high}" if low and high else f">= {low}" if low else f"<= {high}"


QUANTITIES = (
    Quantity("reward", "reward/total/mean", "mean before the filter; rises over tens of steps",
             "flat: see dead groups, then rollouts.jsonl"),
    Quantity("loss", "train/loss/mean", "near 0 is normal: advantages of a group sum to 0", "never read learning off its size"),
    Quantity("gradient", "train/grad_norm/last", "norm before clipping; finite, of one order all along",
             "growing by orders: lower the learning rate"),
    Quantity("entropy", "train/entropy/mean", "of the policy, nats a token; falls slowly", "near 0 early on: raise loss.clip_high"),
    Quantity("stale", "staleness/token/mean", "mean age of trained tokens, in steps", "lower buffer.max_staleness",
             high="max_staleness"),
    Quantity("most stale", "staleness/token/max", "oldest trained token; the bound is a promise", "a fault of asyncrl: report it",
             high="staleness_bound", patience_steps=1),
    Quantity("mismatch", "probe/gap/mean", "engine against trainer at equal weights; float32: 1e-6",
             "one dtype on both sides; at twice this the run ends", high="probe_limit", high_share=0.5, patience_steps=1),
    Quantity("gap", "correction/logprob_gap/mean", "mismatch plus what the policy moved since", "lower max_staleness or the learning rate",
             high=0.1),
    Quantity("ess", "correction/ess/frac", "effective share of samples under their weights", "lower max_staleness or the learning rate",
             low=0.5),
    Quantity("clip", "correction/clipped/frac", "tokens PPO clips; 0 with one update a step", "lower the learning rate, or fewer epochs",
             high=0.2),
    Quantity("kept", "correction/kept/frac", "tokens that survive the correction", "see gap: what is far off is masked", low=0.8),
    Quantity("truncated", "correction/truncated/frac", "tokens whose importance weight was capped", "see gap", high=0.1),
    Quantity("cut", "rollout/truncated_frac/mean", "answers that ran into their limit", "raise sampling.max_new_tokens", high=0.3),
    Quantity("dead groups", "buffer/zero_variance/frac", "groups of equal rewards: no gradient",
             "other prompts, or a larger buffer.group_size", high=0.5),
    Quantity("length bias", "buffer/length_bias/last", "length of trained over all; below 1 long get lost",
             "raise the limits that drop: see dropped, errors", low=0.9, high=1.1),
    Quantity("errors", "rollout/errors/sum", "rollouts that failed; never trained, never reward 0",
             "the kind is shown; logs/ says more",
             low=0, high=0),
    Quantity("skipped", "train/skipped_steps/sum", "steps that changed nothing", "everything masked, or a gradient not finite",
             low=0, high=0),
    Quantity("not finite", "train/nonfinite_steps/sum", "steps with a NaN or infinite gradient; not applied", "lower the learning rate",
             low=0, high=0, patience_steps=1),
    Quantity("changes", "weights/density_ratio/last", "values changed, over what AdamW should change",
             "see docs/weight_sync.md, How much should change", low=0.33, high=6, patience_steps=1,
             # With the law 25% too high, under a third takes three in five weights without a gradient: embeddings of tokens that never come
             # are fewer. Gradients that all agree, as in a first step, move a weight by the learning rate, 5 times a settled step: that and
             # the law's 25% are 6.
             below="weights exactly on the published grid, as a bfloat16 checkpoint has them; parameters without a gradient; "
                   "gradients far under trainer.eps; a learning rate lower than the one set",
             above="a learning rate higher than the one set; optimizer state of another run; weights replaced; a wrong base or dtype"),
    Quantity("trainer waits", "trainer/wait_frac/last", "share of the time it has no batch",
             "more engine threads, or a larger max_staleness", high=0.8),
    Quantity("engines wait", "engine/wait_frac/last", "share of the time they have no request",
             "the trainer is slower: trainer.processes", high=0.8),
)

BY_METRIC = {quantity.metric: quantity for quantity in QUANTITIES}

_TITLE, _RANGE = 13, 10
_PASS_RATES = (0.02, 0.05, 0.1, 0.5)


def dead_group_rate(pass_rate: float, *, group_size: int) -> float:
    """Share of groups without gradient when every rollout passes (reward 1, else 0) with this probability: pᴳ + (1 − p)ᴳ.

    Prompts of unequal difficulty have more.
    """
    return pass_rate**group_size + (1.0 - pass_rate)**group_size


def table(settings: RunSettings) -> list[str]:
    """What healthy values look like, in lines of at most `WIDTH` columns."""
    lines = [f"{'':{_TITLE}} {'healthy':{_RANGE}} what it means", f"{'':{_TITLE}} {'':{_RANGE}} -> when it is not"]
    for quantity in QUANTITIES:
        lines.append(f"{quantity.title:{_TITLE}} {quantity.range_text(settings):{_RANGE}} {quantity.meaning}")
        lines.append(f"{'':{_TITLE}} {'':{_RANGE}} -> {quantity.remedy}")
    rates = ", ".join(f"{dead_group_rate(rate, group_size=settings.group_size):.0%} at {rate:g}" for rate in _PASS_RATES)
    return [*lines, *textwrap.wrap(f"dead groups to expect of {settings.group_size} rollouts, by pass rate: {rates}", WIDTH)]


def markdown() -> str:
    """The table for docs/metrics.md."""
    rows = [f"| {q.title} | `{q.metric}` | {q.rule_text()} | {q.meaning} | {q.remedy} |" for q in QUANTITIES]
    return "\n".join(["| quantity | metric | healthy | what it means | when outside |", "|---|---|---|---|---|", *rows])
