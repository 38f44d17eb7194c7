"""What is known of a run from its rows, and the words for it. Both faces of the console, and `asyncrl watch`, show this."""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrl.observe.figures import count, duration, number, percent, shorten, sparkline
from asyncrl.observe.health import BY_METRIC, Quantity, RunSettings, dead_group_rate

WINDOW_STEPS = 10
"""Steps that a summary averages over."""
_SPARK_STEPS, _SOURCE_SPARK_STEPS, _ETA_STEPS = 24, 8, 20
_MOST_NAMES, _NAME_WIDTH = 8, 20
"""Sources or reasons listed one by one, the rest are counted; and characters of a name."""
_HARDLY = 0.05
"""Waiting less than this share of the time is not worth a word."""

Form = Callable[[float | None], str]


@dataclass(frozen=True, slots=True)
class Cell:
    """A piece of text about a value."""

    text: str
    is_marked: bool = False
    """The value is outside its healthy range."""


@dataclass(frozen=True, slots=True)
class Topic:
    """What a summary says about one thing."""

    title: str
    cells: tuple[Cell, ...]
    in_step_line: bool = False
    """The step line has these values."""


@dataclass(slots=True)
class Board:
    """Takes rows of `metrics.jsonl`, as written or as read back: null, NaN and a missing name are three spellings of two things."""

    settings: RunSettings
    step: int = 0
    """The newest step."""
    latest: dict[str, float] = field(default_factory=dict)
    evaluations: list[dict[str, float]] = field(default_factory=list)
    """Rows of the first and of the newest."""
    _recent: deque[dict[str, float]] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    _rewards: deque[float] = field(default_factory=lambda: deque(maxlen=_SPARK_STEPS))
    _by_source: dict[str, deque[float]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=_SOURCE_SPARK_STEPS)))
    _periods_s: deque[float] = field(default_factory=lambda: deque(maxlen=_ETA_STEPS))
    _probe: dict[str, float] = field(default_factory=dict)
    """Of the newest step before which the parity probe ran; it runs now and then."""
    _dropped: Counter[str] = field(default_factory=Counter)
    _errors: Counter[str] = field(default_factory=Counter)
    _outside: Counter[str] = field(default_factory=Counter)

    def add(self, row: Mapping[str, Any]) -> list[str]:
        """Take in one row, of a step or of an evaluation. Returns a warning for each value that has now been outside for long enough."""
        values = {name: math.nan if value is None else float(value) for name, value in row.items()
                  if value is None or isinstance(value, int | float)}
        if "eval_version" in row:
            self.evaluations[1:] = [values]
            return []
        if "step" not in row:
            return []
        self.step, self.latest = int(row["step"]), values
        self._recent.append(values)
        if "reward/total/mean" in values:
            self._rewards.append(values["reward/total/mean"])
        for source, reward in _named(values, "reward/source.", "/mean"):
            self._by_source[source].append(reward)
        if math.isfinite(period_s := values.get("train/period_s/last", math.nan)):
            self._periods_s.append(period_s)
        if "probe/gap/mean" in values:
            self._probe = values
        self._dropped.update({reason: int(_finite(groups)) for reason, groups in _named(values, "buffer/dropped_", "/groups")})
        self._errors.update({kind: int(_finite(errors)) for kind, errors in _named(values, "rollout/error.", "/sum")})
        return [warning for quantity in BY_METRIC.values() if (warning := self._judge(quantity, values))]

    @property
    def eta_s(self) -> float | None:
        """What the steps that are left will take at the pace of the newest ones, evaluations apart. None before there is a pace."""
        if not self._periods_s:
            return None
        return max(0, self.settings.steps - self.step) * sum(self._periods_s) / len(self._periods_s)

    def window(self) -> dict[str, float]:
        """The newest `WINDOW_STEPS` steps as one: sums, largest and smallest as such, means of everything else."""
        values: dict[str, list[float]] = defaultdict(list)
        for row in self._recent:
            for name, value in row.items():
                values[name].append(value)
        reduce = {"sum": sum, "groups": sum, "tokens": sum, "max": max, "min": min}
        return {name: reduce.get(name.rpartition("/")[2], _mean)(known) for name, known in values.items()}

    def is_marked(self, values: Mapping[str, float], metric: str) -> bool:
        """Whether the value was measured and lies outside its healthy range."""
        quantity = BY_METRIC.get(metric)
        return metric in values and not (quantity.is_healthy(values[metric], self.settings) if quantity else math.isfinite(values[metric]))

    def topics(self, values: Mapping[str, float]) -> list[Topic]:
        """The lines of a summary of `values`: those of one step, or of `window()`."""
        def cell(metric: str, form: Form, text: str = "{}") -> Cell:
            return Cell(text.format(form(values.get(metric))), self.is_marked(values, metric))

        settings = self.settings
        probed = f" (step {self._probe['step']:.0f})" if self._probe else ""
        return [
            Topic("reward", (self._reward(values), *self._sources(values))),
            *self._functions(values),
            Topic("held-out", self.held_out()),
            Topic("stale", (cell("staleness/token/mean", number, "mean {} steps"),
                            cell("staleness/token/max", count, f"max {{}} of {settings.max_staleness}")), in_step_line=True),
            Topic("buffer", (cell("buffer/depth/last", count, "depth {} slots"), cell("buffer/held/last", count, "{} held"),
                             cell("buffer/ready/last", count, "{} ready"), cell("buffer/length_bias/last", number, "length bias {}"))),
            Topic("mismatch", (Cell(f"{_tiny(self._probe.get('probe/gap/mean'))} at equal weights{probed}",
                                    self.is_marked(self._probe, "probe/gap/mean")),
                               cell("correction/logprob_gap/mean", _tiny, "{} with staleness"))),
            Topic("correction", (cell("correction/ess/frac", number, "ess {}"), cell("correction/clipped/frac", percent, "clip {}"),
                                 cell("correction/kept/frac", percent, "kept {}"),
                                 cell("correction/truncated/frac", percent, "truncated {}"))),
            Topic("rollouts", (cell("rollout/truncated_frac/mean", percent, "cut {}"),
                               Cell(f"errors {_listed(self._errors)}", self.is_marked(values, "rollout/errors/sum")),
                               self._dead_groups(values))),
            Topic("dropped", (Cell(f"{_listed(self._dropped)} groups so far"),)),
            Topic("speed", (cell("rollout/tokens_per_s/last", count, "engines {} tok/s"),
                            cell("train/tokens_per_s/last", count, "trainer {} tok/s"),
                            cell("train/period_s/last", _tiny, "{} s a step"))),
            Topic("waiting", self._waiting(values)),
            Topic("weights", (cell("weights/sync_s/mean", _tiny, "sync {} s"), cell("weights/density/mean", percent, "{} changed"),
                              cell("weights/density_ratio/last", number, "{} of predicted"),
                              cell("weights/payload_bytes/mean", count, "{}B sent"))),
            Topic("update", (cell("train/loss/mean", _tiny, "loss {}"), cell("train/entropy/mean", number, "entropy {}"),
                             cell("train/grad_norm/last", _tiny, "grad {}"), cell("train/learning_rate/last", _tiny, "lr {}"),
                             cell("train/skipped_steps/sum", count, "skipped {}"))),
        ]

    def held_out(self) -> tuple[Cell, ...]:
        """The newest evaluation, set by set, and what the first had to compare it with."""
        if not self.evaluations:
            return (Cell("not evaluated"),)
        newest, first = self.evaluations[-1], self.evaluations[0]
        cells = [Cell(f"version {count(newest['eval_version'])}")]
        for name, errors in _named(newest, "eval/", "/errors/sum")[:_MOST_NAMES]:
            reward, before = (row.get(f"eval/{name}/reward/mean", math.nan) for row in (newest, first))
            compared = "" if newest is first else f" from {number(before)}"
            cells.append(Cell(f"{shorten(name, _NAME_WIDTH)} {number(reward)}{compared}", not math.isfinite(reward)))
            cells += [Cell(f"pass@{k} {number(value)}") for k, value in _named(newest, f"eval/{name}/pass_at_", "/mean")[:_MOST_NAMES]]
            if errors:
                cells.append(Cell(f"errors {count(errors)}", True))
        return tuple(cells)

    def _judge(self, quantity: Quantity, values: Mapping[str, float]) -> str:
        if quantity.metric not in values:
            return ""
        value = values[quantity.metric]
        self._outside[quantity.metric] = 0 if quantity.is_healthy(value, self.settings) else self._outside[quantity.metric] + 1
        if self._outside[quantity.metric] != quantity.patience_steps:
            return ""
        healthy = quantity.range_text(self.settings)
        judged = f"{quantity.title} is {_tiny(value)}, healthy {healthy if healthy != '-' else 'finite'}"
        text = f"step {self.step}: {judged}: {quantity.remedy}"
        cause = quantity.cause_text(value, self.settings)
        return f"{text}. Likely {cause}" if cause else text

    def _reward(self, values: Mapping[str, float]) -> Cell:
        return Cell(f"{number(values.get('reward/total/mean'))} {sparkline(self._rewards)}".rstrip(),
                    self.is_marked(values, "reward/total/mean"))

    def _sources(self, values: Mapping[str, float]) -> Iterable[Cell]:
        """Rewards by source, where there are several."""
        known = sorted(self._by_source) if len(self._by_source) > 1 else []
        for source in known[:_MOST_NAMES]:
            reward = values.get(f"reward/source.{source}/mean")
            yield Cell(f"{shorten(source, _NAME_WIDTH)} {number(reward)} {sparkline(self._by_source[source])}",
                       reward is not None and not math.isfinite(reward))
        if len(known) > _MOST_NAMES:
            yield Cell(f"and {len(known) - _MOST_NAMES} more sources")

    def _functions(self, values: Mapping[str, float]) -> list[Topic]:
        """Rewards by function, where there are several."""
        cells = [Cell(f"{shorten(name, _NAME_WIDTH)} {number(value)}", not math.isfinite(value))
                 for name, value in _named(values, "reward/function.", "/mean")]
        return [Topic("functions", tuple(cells[:_MOST_NAMES]))] if len(cells) > 1 else []

    def _dead_groups(self, values: Mapping[str, float]) -> Cell:
        rate = values.get("buffer/zero_variance/frac")
        text = f"dead groups {percent(rate)}"
        pass_rate = values.get("reward/total/mean", math.nan)
        if values.get("reward/zero_or_one/frac") == 1 and 0 <= pass_rate <= 1:
            text += f" ({percent(dead_group_rate(pass_rate, group_size=self.settings.group_size))} expected)"
        return Cell(text, self.is_marked(values, "buffer/zero_variance/frac"))

    def _waiting(self, values: Mapping[str, float]) -> tuple[Cell, ...]:
        trainer, engines = values.get("trainer/wait_frac/last"), values.get("engine/wait_frac/last")
        marks = [self.is_marked(values, name) for name in ("trainer/wait_frac/last", "engine/wait_frac/last")]
        if trainer is not None and engines is not None and max(trainer, engines) < _HARDLY:
            return (Cell(f"nobody for long: trainer {percent(trainer)}, engines {percent(engines)} of the time"),)
        return (Cell(f"trainer waits {percent(trainer)} of the time for rollouts", marks[0]),
                Cell(f"engines {percent(engines)}", marks[1]))


def title(board: Board) -> str:
    """Where the run is, in words."""
    settings = board.settings
    return f"step {board.step} of {settings.steps}, {duration(board.eta_s)} left"


def _tiny(value: float | None) -> str:
    return number(value, width=7, decimals=4)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _named(values: Mapping[str, float], prefix: str, suffix: str) -> list[tuple[str, float]]:
    return [(name.removeprefix(prefix).removesuffix(suffix), value) for name, value in values.items()
            if name.startswith(prefix) and name.endswith(suffix)]


def _listed(counts: Counter[str]) -> str:
    """`3 reward_error, 1 reward_timeout`, the commonest first; 0 when there is none."""
    known = [(name, total) for name, total in counts.most_common() if total]
    if not known:
        return "0"
    more = f", {len(known) - _MOST_NAMES} other reasons" if len(known) > _MOST_NAMES else ""
    return ", ".join(f"{count(total)} {shorten(name, _NAME_WIDTH)}" for name, total in known[:_MOST_NAMES]) + more
