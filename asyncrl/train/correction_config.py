"""The section `correction`: a kind with a setting or two, a preset by name, or every field of a `Correction`. Needs no torch."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from asyncrl.correction import rules
from asyncrl.correction.presets import Preset, preset, presets
from asyncrl.correction.spec import LOG_CLAMP, Correction
from asyncrl.errors import ConfigError
from asyncrl.settings import TAGGED, Section, Tagged, from_kind

Ratio = Annotated[float, Field(gt=0)]
"""proximal / rollout."""


class NoCorrection(Section):
    """Weight 1 on every token, chosen knowingly."""

    kind: Literal["none"]

    def build(self) -> Correction:
        """What `correct` takes."""
        return Correction(level="none")


class TokenTIS(Section):
    """w = min(ratio, truncate_high): truncated importance sampling."""

    kind: Literal["token_tis"]
    truncate_high: Ratio = 2.0
    """A larger ratio counts as this; 2 as in verl and ms-swift."""

    def build(self) -> Correction:
        """What `correct` takes."""
        return Correction(truncate_high=self.truncate_high)


class IcePop(Section):
    """Tokens whose ratio leaves [mask_low, mask_high] lose their gradient. 2510.18855."""

    kind: Literal["icepop"]
    mask_low: Ratio = 0.5
    """Below `mask_high`; 0.5 and 5 are verl's range."""
    mask_high: Ratio = 5.0
    """Above `mask_low`."""

    def build(self) -> Correction:
        """What `correct` takes."""
        return Correction(mask_low=self.mask_low, mask_high=self.mask_high)


class NamedCorrection(Section):
    """The correction of a project or paper, by name: `correction: NAME` says the same. `asyncrl.correction.presets()` lists them."""

    kind: Literal["preset"]
    name: Annotated[str, Field(json_schema_extra={"enum": list(presets())})]
    """Of the preset."""
    loss: Literal["of_preset", "any"] = "of_preset"
    """A preset's name stands for a loss, its settings and its aggregation too: section `loss` must have them, or the run would be called
    what it is not. `any`: the correction alone, under whatever loss."""

    @model_validator(mode="after")
    def _the_preset_is_known(self) -> NamedCorrection:
        try:
            self.build()
        except ConfigError as error:
            raise error.moved("correction", "correction.name") from error
        return self

    def build(self) -> Preset:
        """What `correct` takes."""
        return preset(self.name)


class Bounds(Section):
    """Drops what has a statistic below `low` or above `high`. What each statistic is: `asyncrl.correction.Bounds`."""

    kind: Literal["bounds"]
    statistic: rules.Statistic
    """Of a token: its `ratio`, or an estimate of how far the two policies are apart there."""
    level: rules.Level = "token"
    """What is kept or dropped as one."""
    reduce: rules.Reduce = "mean"
    """How the tokens of a turn or sequence become one number; of ratios `sum` is the product and `mean` the geometric mean."""
    low: float | tuple[float, ...] | None = None
    """A number, or at level `token` one for each staleness 0, 1, …, of which the last holds for all older tokens. None: no bound."""
    high: float | tuple[float, ...] | None = None
    """As `low`; one of the two must be set."""
    drop: rules.Drop = "all"
    """`all` tokens of what is out of bounds, those that push the policy further `away`, or those of `negative` advantage."""
    name: str | None = Field(default=None, pattern="^[a-z0-9_]+$")
    """Of its metric, `correction/rejected_NAME/frac`; made of level, reduce and statistic where it is left out. No two rules share one."""

    def build(self) -> rules.Rule:
        """What a `Correction` takes."""
        return rules.Bounds(statistic=self.statistic, level=self.level, reduce=self.reduce, low=self.low, high=self.high, drop=self.drop,
                            name=self.name or "")


class SecondMoment(Section):
    """Drops tokens until the mean squared log-ratio of the rest is within `limit`. M2PO, 2510.01161."""

    kind: Literal["second_moment"]
    limit: float = Field(default=0.04, gt=0)
    """Mean squared log-ratio; the paper's is 0.04."""
    form: Literal["mask", "tau"] = "mask"
    """`mask`: the largest go first. `tau`: of the tokens that push away, those beyond the threshold that clipping would need."""

    def build(self) -> rules.Rule:
        """What a `Correction` takes."""
        return rules.SecondMoment(limit=self.limit, form=self.form)


class Veto(Section):
    """Drops a sequence when any of its tokens has a ratio below `low`: one catastrophic token."""

    kind: Literal["veto"]
    low: float = Field(default=1e-4, gt=0, le=1)
    """slime's and verl's."""

    def build(self) -> rules.Rule:
        """What a `Correction` takes."""
        return rules.veto(self.low)


class Outlier(Section):
    """Drops a sequence when any of its tokens has a ratio above `high`."""

    kind: Literal["outlier"]
    high: float = Field(default=100.0, ge=1)
    """SkyRL's."""

    def build(self) -> rules.Rule:
        """What a `Correction` takes."""
        return rules.outlier(self.high)


class Geometric(Section):
    """Drops a sequence whose geometric mean ratio leaves [low, high]. Geo-RS, Liu, Li et al. 2025."""

    kind: Literal["geometric"]
    low: Ratio
    """Below 1; sequences of any length may be held close to it, the mean does not grow with them."""
    high: Ratio
    """Above 1."""

    def build(self) -> rules.Rule:
        """What a `Correction` takes."""
        return rules.geometric(low=self.low, high=self.high)


class OPSM(Section):
    """Drops a sequence of negative advantage whose mean log(rollout / proximal) exceeds `limit`. DeepSeek-V3.2, 2512.02556."""

    kind: Literal["opsm"]
    limit: float = Field(default=1e-4, ge=0)
    """slime's."""

    def build(self) -> rules.Rule:
        """What a `Correction` takes."""
        return rules.opsm(self.limit)


class VACO(Section):
    """In sequences with a mean |ratio − 1| above `high`, drops the tokens that push further away. 2603.01365."""

    kind: Literal["vaco"]
    high: float = Field(gt=0)
    """Twice a total variation."""

    def build(self) -> rules.Rule:
        """What a `Correction` takes."""
        return rules.vaco(self.high)


class KPop(Section):
    """Drops tokens whose binary KL, the larger of both directions, exceeds `high`."""

    kind: Literal["kpop"]
    high: float = Field(gt=0)
    """In nats."""

    def build(self) -> rules.Rule:
        """What a `Correction` takes."""
        return rules.kpop(self.high)


class DPPOTV(Section):
    """Drops tokens that push away and whose probability moved by more than `high` up or `low` down. DPPO, 2602.04879."""

    kind: Literal["dppo_tv"]
    low: float = Field(default=0.15, gt=0, lt=1)
    """A difference of probabilities; 0.15 is the paper's."""
    high: float = Field(default=0.15, gt=0, lt=1)
    """As `low`."""

    def build(self) -> rules.Rule:
        """What a `Correction` takes."""
        return rules.dppo_tv(low=self.low, high=self.high)


class DPPOKL(Section):
    """Drops tokens that push away and whose binary KL(rollout ‖ proximal) exceeds `high`. DPPO, 2602.04879."""

    kind: Literal["dppo_kl"]
    high: float = Field(default=0.05, gt=0)
    """In nats; 0.05 is the paper's."""

    def build(self) -> rules.Rule:
        """What a `Correction` takes."""
        return rules.dppo_kl(self.high)


Rule = Annotated[Bounds | SecondMoment | Veto | Outlier | Geometric | OPSM | VACO | KPop | DPPOTV | DPPOKL, TAGGED]


class CustomCorrection(Section):
    """Every setting of a correction: what a weight is formed over, its bounds, what is dropped. `asyncrl.correction.Correction` has the
    formulas. A bound by staleness is a list, for 0, 1, … steps, of which the last holds for all older tokens."""

    kind: Literal["custom"]
    level: Literal["none", "token", "turn", "sequence"] = "token"
    """What a weight is formed over; `none` leaves every kept token at weight 1."""
    reduce: Literal["sum", "mean"] = "sum"
    """Over a turn or a sequence: the product of the ratios, or their geometric mean."""
    truncate_low: Ratio | tuple[Ratio, ...] | None = None
    """Weights below it are raised to it."""
    truncate_high: Ratio | tuple[Ratio, ...] | None = None
    """Weights above it are lowered to it."""
    mask_low: Ratio | tuple[Ratio, ...] | None = None
    """Where the ratio of the level is below it the tokens are dropped."""
    mask_high: Ratio | tuple[Ratio, ...] | None = None
    """Where the ratio of the level is above it the tokens are dropped."""
    reject: tuple[Rule, ...] = ()
    """Rules that drop tokens and sequences for other reasons than their own weight."""
    normalize: Literal["token", "sequence"] | None = None
    """Divide by the mean weight of all loss tokens, or sequences, of the batch; before rejection, which is not made up for."""
    denominator: Literal["original", "kept"] = "original"
    """What the loss is divided by: tokens before the correction, or those that survived, which makes the step longer."""
    proximal: Literal["recompute", "log_linear"] = "recompute"
    """Where the proximal logprobs come from: a forward before the step, or a guess between rollout and current logprobs by version
    (A-3PO, 2512.06547). The guess takes token weights alone, drops nothing and leaves out the metrics of `correction`."""
    log_clamp: float = Field(default=LOG_CLAMP, gt=0, le=40)
    """Bound on the absolute log-ratio before exp."""

    def build(self) -> Correction:
        """What `correct` takes. Raises ConfigError."""
        return Correction(level=self.level, reduce=self.reduce, truncate_low=self.truncate_low, truncate_high=self.truncate_high,
                          mask_low=self.mask_low, mask_high=self.mask_high, reject=self._rules(), normalize=self.normalize,
                          denominator=self.denominator, proximal=self.proximal, log_clamp=self.log_clamp)

    def _rules(self) -> tuple[rules.Rule, ...]:
        built = []
        for index, rule in enumerate(self.reject):
            try:
                built.append(rule.build())
            except ConfigError as error:
                raise error.moved("correction.reject", f"correction.reject.{index}") from error
        return tuple(built)


_KINDS = ("none", "token_tis", "icepop", "preset", "custom")


def from_preset(value: Any) -> Any:
    """`from_kind`, and `"areal/decoupled"` for `{kind: preset, name: areal/decoupled}`. Raises ConfigError for what is neither."""
    section = from_kind(value)
    kind = section.get("kind") if isinstance(section, Mapping) else None
    if not isinstance(kind, str) or kind in _KINDS:
        return section
    if kind in presets():
        return {"name": kind, **section, "kind": "preset"}
    known = [*_KINDS, *presets()]
    raise ConfigError("correction.kind", value=kind, allowed=f"one of {list(_KINDS)}, or a preset: {list(presets())}",
                      remedy=f"Did you mean {difflib.get_close_matches(kind, known, n=1, cutoff=0.0)[0]!r}?")


CorrectionConfig = Annotated[NoCorrection | TokenTIS | IcePop | NamedCorrection | CustomCorrection, Tagged(read=from_preset, names=presets)]
