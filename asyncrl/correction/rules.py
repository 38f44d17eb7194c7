"""Which tokens a correction drops, as data. Needs no torch.

A rule looks at the log-ratio ℓ = proximal − rollout of the loss tokens and says what stays. Rules do not see one another: each is
asked about the whole batch, and what any of them drops is dropped.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal, get_args

from asyncrl.errors import ConfigError

Statistic = Literal["ratio", "k1", "k2", "k3", "k3_reverse", "binary_kl", "binary_kl_rollout", "prob_difference", "ratio_gap"]
Level = Literal["token", "turn", "sequence"]
Reduce = Literal["sum", "mean", "max", "min"]
Drop = Literal["all", "away", "negative"]
Bound = float | tuple[float, ...]
"""One bound for every token, or one for each staleness 0, 1, …, of which the last holds for all older tokens."""
_NAME = re.compile(r"[A-Za-z0-9_]+")
_RANGES = {**dict.fromkeys(("k2", "k3", "k3_reverse", "binary_kl", "binary_kl_rollout", "ratio_gap"), (0.0, math.inf)),
           "prob_difference": (-1.0, 1.0)}
"""Where a statistic lies that is not any number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Keep what has low ≤ statistic ≤ high; drop the rest of the level's tokens, or those of them that `drop` names.

        ratio              e^ℓ of the reduced ℓ: the product over the level (sum), the geometric mean (mean), the largest, the smallest
        k1                 −ℓ                   k2  ℓ² / 2
        k3                 e^ℓ − 1 − ℓ          k3_reverse  e^−ℓ − 1 + ℓ, the estimate of KL(proximal ‖ rollout) from proximal samples
        binary_kl          KL of "this token or another" between the policies, the larger of both directions
        binary_kl_rollout  the same, KL(rollout ‖ proximal) alone
        prob_difference    p_proximal − p_rollout
        ratio_gap          |e^ℓ − 1|, twice an estimate of the total variation

    Both bounds are inclusive. A NaN is kept: it reaches the loss, where the gradient guard sees it. Raises ConfigError.
    """

    statistic: Statistic
    level: Level = "token"
    """What is kept or dropped as one."""
    reduce: Reduce = "mean"
    """How the statistic of the level's loss tokens becomes one number; of ℓ itself for `ratio`. Means nothing at level "token"."""
    low: Bound | None = None
    high: Bound | None = None
    drop: Drop = "all"
    """all tokens of what is out of bounds; those that push the policy `away`, ℓ · A > 0; those of `negative` advantage."""
    name: str = ""
    """In metrics, `correction/rejected_NAME/frac`; made of level, reduce, statistic and drop where it is left empty."""

    def __post_init__(self) -> None:
        for field, kinds in (("statistic", Statistic), ("level", Level), ("reduce", Reduce), ("drop", Drop)):
            require_one_of(f"correction.reject.{field}", getattr(self, field), allowed=get_args(kinds))
        if self.low is None and self.high is None:
            raise ConfigError("correction.reject.low, correction.reject.high", value=(None, None), allowed="at least one bound",
                              remedy="Without one nothing is ever rejected; remove the rule or set a bound.")
        if self.level == "token" and self.reduce != "mean":
            raise ConfigError("correction.reject.reduce, correction.reject.level", value=(self.reduce, self.level),
                              allowed="a reduction over turns or sequences", remedy="A token has one value; leave reduce out.")
        for field in ("low", "high"):
            self._check_bound(field)
        require_order("correction.reject.low, correction.reject.high", low=self.low, high=self.high)
        if not self.name:
            parts = (self.level, "" if self.level == "token" else self.reduce, self.statistic, "" if self.drop == "all" else self.drop)
            object.__setattr__(self, "name", "_".join(filter(None, parts)))
        require_name(self.name)

    def _check_bound(self, field: str) -> None:
        bound = getattr(self, field)
        require_bound(f"correction.reject.{field}", bound, is_ratio=self.statistic == "ratio")
        least, most = _RANGES.get(self.statistic, (-math.inf, math.inf))
        for number in numbers_of(bound):
            if not least <= number <= most:
                raise ConfigError(f"correction.reject.{field}, correction.reject.statistic", value=(number, self.statistic),
                                  allowed=f"a bound in [{least:g}, {most:g}], where {self.statistic} lies",
                                  remedy="Beyond it the rule would drop nothing, or everything.")
        if isinstance(bound, tuple) and self.level != "token":
            raise ConfigError(f"correction.reject.{field}, correction.reject.level", value=(bound, self.level),
                              allowed="a bound for each staleness at level 'token' alone",
                              remedy="A turn or a sequence may hold several versions; give one number.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondMoment:
    """Bound the mean ℓ² of the tokens that stay: M2PO, 2510.01161. Looks at the whole batch at once.

        mask  drop the tokens of largest ℓ² until the mean over the rest is below `limit` (section 4); a tie is dropped whole,
              and the tokens of the smallest ℓ² always stay
        tau   among harmful tokens, ℓ · A > 0, solve Σ min(ℓ², τ²) = limit · n_harmful and drop those with |ℓ| > τ: a clip to
              [e^−τ, e^τ] gives these no gradient either

    Departures: the tau form is the authors' code with the exact root and without its wider minimum clip.
    """

    limit: float = 0.04
    form: Literal["mask", "tau"] = "mask"
    name: str = "second_moment"

    def __post_init__(self) -> None:
        require_one_of("correction.reject.form", self.form, allowed=("mask", "tau"))
        require_name(self.name)
        if not is_number(self.limit) or not 0.0 < self.limit < math.inf:
            raise ConfigError("correction.reject.limit", value=self.limit, allowed="a finite number above 0",
                              remedy="The paper's is 0.04, a mean squared log-ratio.")


Rule = Bounds | SecondMoment


def veto(low: float = 1e-4) -> Bounds:
    """Drop a sequence when any of its loss tokens has a ratio below `low`: one catastrophic token. slime's and verl's veto."""
    return Bounds(statistic="ratio", level="sequence", reduce="min", low=low, name="veto")


def outlier(high: float = 100.0) -> Bounds:
    """Drop a sequence when any of its loss tokens has a ratio above `high`: the other half of SkyRL's outlier mask."""
    return Bounds(statistic="ratio", level="sequence", reduce="max", high=high, name="outlier")


def geometric(*, low: float, high: float) -> Bounds:
    """Drop a sequence whose geometric mean ratio leaves [low, high]. Liu, Li et al. 2025, "When speed kills stability" (Geo-RS)."""
    return Bounds(statistic="ratio", level="sequence", reduce="mean", low=low, high=high, name="geometric")


def opsm(limit: float = 1e-4) -> Bounds:
    """Drop a sequence of negative advantage whose mean log(rollout / proximal) exceeds `limit`. DeepSeek-V3.2, 2512.02556, equation 9.

    Departure: the paper compares with the current policy, in every minibatch; here with the proximal one, once a step.
    """
    return Bounds(statistic="k1", level="sequence", reduce="mean", high=limit, drop="negative", name="opsm")


def vaco(high: float) -> Bounds:
    """In sequences with mean |ratio − 1| above `high`, drop the tokens that push further away. VACO, 2603.01365."""
    return Bounds(statistic="ratio_gap", level="sequence", reduce="mean", high=high, drop="away", name="vaco")


def kpop(high: float) -> Bounds:
    """Drop tokens whose binary KL, the larger of both directions, exceeds `high`. KPop, in AReaL `binary_kl`."""
    return Bounds(statistic="binary_kl", high=high, name="kpop")


def dppo_tv(*, low: float = 0.15, high: float = 0.15) -> Bounds:
    """Drop tokens that push away and whose probability moved by more than `high` up or `low` down. DPPO, 2602.04879, binary TV.

    0.15 is the paper's, as in `catalog.dppo_tv`. Departure: measured once a step on the proximal policy; there on the current one.
    """
    return Bounds(statistic="prob_difference", low=-low, high=high, drop="away", name="dppo_tv")


def dppo_kl(high: float = 0.05) -> Bounds:
    """Drop tokens that push away and whose binary KL(rollout ‖ proximal) exceeds `high`. DPPO, 2602.04879, with its 0.05.

    Departure as in `dppo_tv`.
    """
    return Bounds(statistic="binary_kl_rollout", high=high, drop="away", name="dppo_kl")


def require_one_of(field: str, value: object, *, allowed: tuple[str, ...]) -> None:
    """Raise ConfigError unless the value is one of these names."""
    if value not in allowed:
        raise ConfigError(field, value=value, allowed=f"one of {', '.join(allowed)}", remedy="Choose one of them.")


def require_bound(field: str, bound: Bound | None, *, is_ratio: bool, log_clamp: float = math.inf) -> None:
    """Raise ConfigError unless every number of the bound is finite, and for a ratio above 0 and inside the clamp."""
    if isinstance(bound, tuple) and not bound:
        raise ConfigError(field, value=bound, allowed="a number, or one for each staleness", remedy="Give at least one number.")
    for number in numbers_of(bound):
        if not is_number(number):
            raise ConfigError(field, value=bound, allowed="a number, or a tuple of numbers, one for each staleness",
                              remedy="Write 2.0, or (2.0, 1.5, 1.2).")
        inside = math.exp(-log_clamp) < number < math.exp(min(log_clamp, 700.0)) if is_ratio else math.isfinite(number)
        if not inside:
            allowed, remedy = ((f"a ratio above 0 and inside exp(±{log_clamp:g})",
                                "Bounds are ratios, not log-ratios: 2.0 means twice as likely under the trainer.") if is_ratio
                               else ("a finite number", "Leave the bound out where there is none."))
            raise ConfigError(field, value=number, allowed=allowed, remedy=remedy)


def is_number(value: object) -> bool:
    """Whether it is a number that a float holds; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and (isinstance(value, float) or abs(value) < 2**1000)


def require_name(name: object) -> None:
    """Raise ConfigError unless a rule can be called so in a metric."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError("correction.reject.name", value=name, allowed="letters, digits and _", remedy="It is part of a metric's name.")


def numbers_of(bound: Bound | None) -> tuple[float, ...]:
    """The numbers of a bound, by staleness."""
    return bound if isinstance(bound, tuple) else () if bound is None else (bound,)


def require_order(fields: str, *, low: Bound | None, high: Bound | None) -> None:
    """Raise ConfigError when at some staleness nothing lies between the two bounds."""
    if low is None or high is None:
        return
    lows, highs = numbers_of(low), numbers_of(high)
    for staleness in range(max(len(lows), len(highs))):
        pair = (lows[min(staleness, len(lows) - 1)], highs[min(staleness, len(highs) - 1)])
        if pair[0] >= pair[1]:
            raise ConfigError(fields, value=pair, allowed="a lower bound below the upper one",
                              remedy="Nothing would be kept; widen the range.")
