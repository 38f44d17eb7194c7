import math
from collections.abc import Callable

import pytest

from asyncrl.correction import Bounds, Correction, SecondMoment
from asyncrl.correction.rules import dppo_kl, dppo_tv, geometric, kpop, opsm, outlier, vaco, veto
from asyncrl.errors import ConfigError

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(("fields", "field"), [
    ({"statistic": "k4", "high": 1.0}, "correction.reject.statistic"),
    ({"statistic": "k1", "level": "word", "high": 1.0}, "correction.reject.level"),
    ({"statistic": "k1", "reduce": "median", "high": 1.0}, "correction.reject.reduce"),
    ({"statistic": "k1", "drop": "some", "high": 1.0}, "correction.reject.drop"),
    ({"statistic": "k1"}, "correction.reject.low, correction.reject.high"),
    ({"statistic": "k2", "high": NAN}, "correction.reject.high"),
    ({"statistic": "k2", "high": INF}, "correction.reject.high"),
    ({"statistic": "ratio", "low": 0.0}, "correction.reject.low"),
    ({"statistic": "ratio", "high": -1.0}, "correction.reject.high"),
    ({"statistic": "ratio", "low": 2.0, "high": 0.5}, "correction.reject.low, correction.reject.high"),
    ({"statistic": "ratio", "low": (0.5, 2.5), "high": 2.0}, "correction.reject.low, correction.reject.high"),
    ({"statistic": "ratio", "high": ()}, "correction.reject.high"),
    ({"statistic": "ratio", "high": True}, "correction.reject.high"),
    ({"statistic": "ratio", "level": "sequence", "high": (2.0, 1.5)}, "correction.reject.high, correction.reject.level"),
])
def test_bounds_that_cannot_work_are_refused_by_name(fields: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Bounds(**fields)
    assert caught.value.field == field


@pytest.mark.parametrize("limit", [0.0, -1.0, NAN, INF])
def test_a_second_moment_needs_a_limit_above_zero(limit: float) -> None:
    with pytest.raises(ConfigError, match=r"correction\.reject\.limit"):
        SecondMoment(limit=limit)


def test_a_rule_names_itself_by_what_it_looks_at() -> None:
    assert Bounds(statistic="k3", level="sequence", high=0.3).name == "sequence_mean_k3"
    assert Bounds(statistic="k3", high=0.3).name == "token_k3"
    assert Bounds(statistic="k3", high=0.3, name="mine").name == "mine"


@pytest.mark.parametrize(("make", "name"), [
    (veto, "veto"), (outlier, "outlier"), (opsm, "opsm"), (lambda: vaco(0.5), "vaco"), (lambda: kpop(0.05), "kpop"), (dppo_tv, "dppo_tv"),
    (lambda: dppo_kl(0.01), "dppo_kl"), (lambda: geometric(low=0.99, high=1.01), "geometric")])
def test_the_known_rules_carry_their_own_names(make: Callable[[], Bounds], name: str) -> None:
    assert make().name == name


@pytest.mark.parametrize(("fields", "field"), [
    ({"reduce": "max"}, "correction.reduce"),
    ({"normalize": "batch"}, "correction.normalize"),
    ({"denominator": "half"}, "correction.denominator"),
    ({"proximal": "guess"}, "correction.proximal"),
    ({"truncate_low": 3.0, "truncate_high": 2.0}, "correction.truncate_low, correction.truncate_high"),
    ({"truncate_high": (2.0, 1.5), "level": "sequence"}, "correction.truncate_high, correction.level"),
    ({"truncate_low": 0.5, "level": "none"}, "correction.truncate_low, correction.level"),
    ({"normalize": "token", "level": "none"}, "correction.normalize, correction.level"),
    ({"reject": (veto(), veto(1e-3))}, "correction.reject"),
])
def test_corrections_that_contradict_themselves_are_refused_by_name(fields: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Correction(**fields)
    assert caught.value.field == field


@pytest.mark.parametrize(("field", "value"), [
    ("level", "sequence"), ("reject", (veto(),)), ("normalize", "token"), ("denominator", "kept"), ("mask_low", 0.5), ("mask_high", 2.0),
    ("truncate_high", (2.0, 1.5))])
def test_a_log_linear_ratio_judges_nothing(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        Correction(proximal="log_linear", **{field: value})
    assert caught.value.field == f"correction.proximal, correction.{field}"
    assert Correction(proximal="log_linear", truncate_high=2.0).truncate_high == 2.0


@pytest.mark.parametrize(("correction", "is_local"), [
    (Correction(truncate_high=2.0), True), (Correction(level="none"), True), (Correction(truncate_high=(2.0, 1.5)), True),
    (Correction(reject=(kpop(0.05),)), True), (Correction(level="turn"), False), (Correction(level="sequence"), False),
    (Correction(reject=(veto(),)), False), (Correction(reject=(SecondMoment(),)), False), (Correction(normalize="token"), False),
    (Correction(denominator="kept"), False)])
def test_only_what_looks_at_one_token_may_run_on_a_slice(correction: Correction, is_local: bool) -> None:
    assert correction.is_token_local is is_local


@pytest.mark.parametrize(("fields", "field"), [
    ({"statistic": "k2", "high": -1.0}, "correction.reject.high, correction.reject.statistic"),
    ({"statistic": "prob_difference", "high": 3.0}, "correction.reject.high, correction.reject.statistic"),
    ({"statistic": "k1", "reduce": "sum", "high": 1.0}, "correction.reject.reduce, correction.reject.level"),
    ({"statistic": "k3", "high": 10**400}, "correction.reject.high"), ({"statistic": "k3", "high": "2"}, "correction.reject.high"),
    ({"statistic": "k3", "high": [2.0]}, "correction.reject.high"), ({"statistic": "k3", "high": 1.0, "name": 3}, "correction.reject.name"),
    ({"statistic": "k3", "high": 1.0, "name": "a/b"}, "correction.reject.name")])
def test_bounds_nothing_can_reach_and_settings_nobody_reads_are_refused(fields: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Bounds(**fields)
    assert caught.value.field == field


@pytest.mark.parametrize(("fields", "field"), [
    ({"reduce": "mean"}, "correction.reduce, correction.level"), ({"truncate_high": "2"}, "correction.truncate_high"),
    ({"truncate_high": [1.0, 2.0]}, "correction.truncate_high"), ({"reject": veto()}, "correction.reject"),
    ({"reject": [veto()]}, "correction.reject"), ({"log_clamp": "a"}, "correction.log_clamp"),
    ({"log_clamp": True}, "correction.log_clamp")])
def test_corrections_of_wrong_types_are_refused_by_name(fields: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Correction(**fields)
    assert caught.value.field == field


def test_two_rules_of_one_statistic_differ_by_what_they_drop() -> None:
    away, negative = Bounds(statistic="ratio", high=5.0, drop="away"), Bounds(statistic="ratio", low=0.1, drop="negative")
    assert [rule.name for rule in Correction(reject=(away, negative)).reject] == ["token_ratio_away", "token_ratio_negative"]
