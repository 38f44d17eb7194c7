"""A correction as text: what is weighed, what is kept and what is dropped, made of its fields. No torch."""

from __future__ import annotations

from asyncrl.correction.rules import Bound, Bounds, Rule
from asyncrl.correction.spec import Correction

_OF_RATIOS = {"sum": "product of r over the", "mean": "geometric mean of r over the", "max": "largest r of the", "min": "smallest r of the"}
_OF_OTHERS = {"sum": "sum of {} over the", "mean": "mean of {} over the", "max": "largest {} of the", "min": "smallest {} of the"}
_STATISTICS = {"k1": "−ℓ", "k2": "ℓ²/2", "k3": "e^ℓ − 1 − ℓ", "k3_reverse": "e^−ℓ − 1 + ℓ", "binary_kl": "binary KL, both ways",
               "binary_kl_rollout": "binary KL(rollout ‖ proximal)", "prob_difference": "p_proximal − p_rollout", "ratio_gap": "|r − 1|"}


def formula(correction: Correction) -> list[str]:
    """Lines that say what `weigh` computes."""
    proximal = "proximal" if correction.proximal == "recompute" else "log-linear proximal"
    lines = [f"ℓ = {proximal} − rollout, r = e^ℓ, |ℓ| held to {_number(correction.log_clamp)} before exp"]
    if _masks(correction):
        lines.append(f"keep    where {_between(_subject(correction), low=correction.mask_low, high=correction.mask_high)}")
    lines += [f"drop    {rule_text(rule)}" for rule in correction.reject]
    lines.append(f"weight  {weight_text(correction)} where kept, else 0")
    if correction.normalize is not None:
        lines.append(f"        divided by the mean weight of {correction.normalize}s")
    return [*lines, f"over    tokens {'that are kept' if correction.denominator == 'kept' else 'before correction'}"]


def weight_text(correction: Correction) -> str:
    """The weight of a kept token."""
    low, high, subject = correction.truncate_low, correction.truncate_high, _subject(correction)
    if correction.level == "none":
        return "1"
    if low is not None and high is not None:
        return f"clip({subject}, {_bound(low)}, {_bound(high)})"
    if high is not None:
        return f"min({subject}, {_bound(high)})"
    return subject if low is None else f"max({subject}, {_bound(low)})"


def kept_text(correction: Correction) -> str:
    """What stays, in a few words: by the weight's own ratio and by each rule."""
    parts = [_between(_subject(correction), low=correction.mask_low, high=correction.mask_high)] if _masks(correction) else []
    return "; ".join([*parts, *(_rule_condition(rule) for rule in correction.reject)]) or "all"


def rule_text(rule: Rule) -> str:
    """What a rule drops."""
    if not isinstance(rule, Bounds):
        if rule.form == "mask":
            return f"tokens of the largest ℓ² until the mean ℓ² of the rest is below {_number(rule.limit)}"
        return f"tokens with ℓ·A > 0 and |ℓ| > τ, where Σ min(ℓ², τ²) = {_number(rule.limit)} · n over the n tokens with ℓ·A > 0"
    which = {"all": "", "away": "tokens with ℓ·A > 0", "negative": "tokens with A < 0"}[rule.drop]
    where = f"{which} of {rule.level}s" if which and rule.level != "token" else which or f"{rule.level}s"
    return f"{where} unless {_between(_statistic(rule), low=rule.low, high=rule.high)}"


def _rule_condition(rule: Rule) -> str:
    if not isinstance(rule, Bounds):
        return f"mean ℓ² < {_number(rule.limit)}" if rule.form == "mask" else f"|ℓ| ≤ τ({_number(rule.limit)}) or ℓ·A ≤ 0"
    but = {"all": "", "away": " or ℓ·A ≤ 0", "negative": " or A ≥ 0"}[rule.drop]
    return f"{_between(_statistic(rule), low=rule.low, high=rule.high)}{but}"


def _masks(correction: Correction) -> bool:
    return correction.mask_low is not None or correction.mask_high is not None


def _subject(correction: Correction) -> str:
    """The ratio that a weight is made of."""
    return "r" if correction.level in ("none", "token") else f"{_OF_RATIOS[correction.reduce]} {correction.level}"


def _statistic(rule: Bounds) -> str:
    if rule.statistic == "ratio":
        return "r" if rule.level == "token" else f"{_OF_RATIOS[rule.reduce]} {rule.level}"
    plain = _STATISTICS[rule.statistic]
    return plain if rule.level == "token" else f"{_OF_OTHERS[rule.reduce].format(plain)} {rule.level}"


def _between(subject: str, *, low: Bound | None, high: Bound | None) -> str:
    return (f"{_bound(low)} ≤ " if low is not None else "") + subject + (f" ≤ {_bound(high)}" if high is not None else "")


def _bound(bound: Bound) -> str:
    """A number, or one for each staleness."""
    return _number(bound) if not isinstance(bound, tuple) else f"[{', '.join(map(_number, bound))} by staleness]"


def _number(value: float) -> str:
    return f"{value:.6g}"
