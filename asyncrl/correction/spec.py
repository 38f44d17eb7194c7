"""What a correction is. No torch here: configuration and controller read this file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asyncrl.correction.rules import Bound, Bounds, Rule, SecondMoment, is_number, require_bound, require_one_of, require_order
from asyncrl.errors import ConfigError

LOG_CLAMP = 20.0
"""Log-ratios are held to ±20 before exp: e^20 = 4.9e8 has room in float32 even squared, and lies far beyond any bound in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """How the log-ratio ℓ = proximal − rollout of tokens becomes importance weights. Bounds are given as ratios.

    With ℓ_L the sum or mean of ℓ over the loss tokens of a token's level, and ratio = exp(clamp(ℓ_L, ±log_clamp)):

        keep   = loss_mask and mask_low ≤ ratio ≤ mask_high and every rule of `reject` keeps the token
        weight = clamp(ratio, truncate_low, truncate_high) if keep else 0      level "token", "turn", "sequence"
        weight = 1 if keep else 0                                              level "none"
        weight = weight / mean weight                                          with `normalize`, over the whole batch, before `reject`

    Raises ConfigError for bounds that contradict one another or that the clamp would hide.
    """

    level: Literal["none", "token", "turn", "sequence"] = "token"
    """What a weight is formed over; "none" leaves every kept token at weight 1."""
    reduce: Literal["sum", "mean"] = "sum"
    """Over a turn or a sequence: the product of the ratios, or their geometric mean."""
    truncate_low: Bound | None = None
    """Weights below it are raised to it. None: no floor."""
    truncate_high: Bound | None = None
    """Weights above it are lowered to it (TIS). None: no cap."""
    mask_low: Bound | None = None
    """Where the ratio is below it the weight is 0 (MIS, IcePop). None: no lower bound."""
    mask_high: Bound | None = None
    """Where the ratio is above it the weight is 0. None: no upper bound."""
    reject: tuple[Rule, ...] = ()
    """Tokens and sequences that are dropped for other reasons than their own weight."""
    normalize: Literal["token", "sequence"] | None = None
    """Divide by the mean weight of the batch's loss tokens, or of its sequences: after truncation, masked weights counting as 0, and
    before rejection, so that what is rejected shortens the step instead of weighing on what is left."""
    denominator: Literal["original", "kept"] = "original"
    """What the loss is divided by: tokens before the correction, or those that survived. "kept" lengthens the step by the
    ratio of the two, which is logged."""
    proximal: Literal["recompute", "log_linear"] = "recompute"
    """Where the proximal logprobs come from; "log_linear" stands between rollout and current logprobs by version (`proximal.py`)."""
    log_clamp: float = LOG_CLAMP
    """Bound on |ℓ_L| before exp; tokens beyond it are counted."""

    def __post_init__(self) -> None:
        for field, allowed in (("level", ("none", "token", "turn", "sequence")), ("reduce", ("sum", "mean")),
                               ("denominator", ("original", "kept")), ("proximal", ("recompute", "log_linear"))):
            require_one_of(f"correction.{field}", getattr(self, field), allowed=allowed)
        if self.normalize is not None:
            require_one_of("correction.normalize", self.normalize, allowed=("token", "sequence"))
        if not is_number(self.log_clamp) or not 0.0 < self.log_clamp <= 40.0:
            raise ConfigError("correction.log_clamp", value=self.log_clamp, allowed="a number in (0, 40]",
                              remedy="Leave it at 20; above 40 a squared ratio overflows float32.")
        for field in ("truncate_low", "truncate_high", "mask_low", "mask_high"):
            self._check_bound(field)
        require_order("correction.truncate_low, correction.truncate_high", low=self.truncate_low, high=self.truncate_high)
        require_order("correction.mask_low, correction.mask_high", low=self.mask_low, high=self.mask_high)
        if self.reduce == "mean" and self.level in ("none", "token"):
            raise ConfigError("correction.reduce, correction.level", value=(self.reduce, self.level),
                              allowed="'mean' over turns or sequences", remedy="There is one ratio a token; leave reduce out.")
        self._check_rules()
        if self.proximal == "log_linear":
            self._check_log_linear()

    @property
    def is_token_local(self) -> bool:
        """Whether a token's weight depends on that token alone, so that any slice of a batch gives the same result."""
        return (self.level in ("none", "token") and self.normalize is None and self.denominator == "original"
                and all(isinstance(rule, Bounds) and rule.level == "token" for rule in self.reject))

    def _check_bound(self, field: str) -> None:
        bound = getattr(self, field)
        require_bound(f"correction.{field}", bound, is_ratio=True, log_clamp=self.log_clamp)
        if bound is not None and self.level == "none" and field.startswith("truncate"):
            raise ConfigError(f"correction.{field}, correction.level", value=(bound, self.level),
                              allowed="a cap only where there are weights", remedy="Set level to 'token' or remove the cap.")
        if isinstance(bound, tuple) and self.level in ("turn", "sequence"):
            raise ConfigError(f"correction.{field}, correction.level", value=(bound, self.level),
                              allowed="a bound for each staleness at level 'token' or 'none'",
                              remedy="A turn or a sequence may hold several versions; give one number.")

    def _check_rules(self) -> None:
        if not isinstance(self.reject, tuple) or not all(isinstance(rule, Bounds | SecondMoment) for rule in self.reject):
            raise ConfigError("correction.reject", value=self.reject, allowed="a tuple of Bounds and SecondMoment",
                              remedy="One rule is a tuple too: reject=(veto(),).")
        names = [rule.name for rule in self.reject]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError("correction.reject", value=sorted(twice), allowed="rules with different names, which their metrics have",
                              remedy="Set `name` in one of them.")
        if self.normalize is not None and self.level == "none":
            raise ConfigError("correction.normalize, correction.level", value=(self.normalize, self.level),
                              allowed="weights to normalise", remedy="Choose a level, or remove normalize.")

    def _check_log_linear(self) -> None:
        refused = {"truncate_low": isinstance(self.truncate_low, tuple), "truncate_high": isinstance(self.truncate_high, tuple),
                   "level": self.level in ("turn", "sequence"), "reject": bool(self.reject),
                   "normalize": self.normalize is not None, "denominator": self.denominator == "kept",
                   "mask_low": self.mask_low is not None, "mask_high": self.mask_high is not None}
        for field in (name for name, is_set in refused.items() if is_set):
            raise ConfigError(f"correction.proximal, correction.{field}", value=("log_linear", getattr(self, field)),
                              allowed="token weights, truncated or not, over log-linear proximal logprobs",
                              remedy="They are a guess, and different at every forward: what is judged by them would be judged by a guess. "
                                     "Set proximal to 'recompute'.")
