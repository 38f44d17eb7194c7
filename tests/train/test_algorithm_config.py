"""The sections `correction` and `loss`: what stands for what, and which go together."""

import dataclasses
import inspect

import pytest

from asyncrl.correction import Bounds, Correction, SecondMoment, preset, presets
from asyncrl.correction.rules import geometric, veto
from asyncrl.errors import ConfigError
from asyncrl.settings import kinds_of, members_of
from asyncrl.train.config import TrainConfig, validated
from asyncrl.train.correction_config import CustomCorrection
from asyncrl.train.loss_config import LossConfig
from asyncrl.train.policy_update import _FUNCTIONS


def config(correction: object, loss: object = "decoupled_ppo", **trainer: object) -> TrainConfig:
    return validated({"trainer": {"learning_rate": 1e-3, **trainer}, "correction": correction, "loss": loss})


def loss_of(name: str) -> dict[str, object]:
    known = preset(name)
    return {"kind": known.loss, **dict(known.loss_settings), "aggregation": known.aggregation}


@pytest.mark.parametrize("name", presets())
def test_every_preset_trains_with_the_loss_it_names(name: str) -> None:
    for written in (name, {"kind": "preset", "name": name}):
        built = config(written, loss_of(name)).build_correction()
        assert {field.name: getattr(built, field.name) for field in dataclasses.fields(Correction)} == {
            field.name: getattr(preset(name), field.name) for field in dataclasses.fields(Correction)}


def test_a_preset_is_refused_under_another_loss_unless_it_is_told() -> None:
    with pytest.raises(ConfigError, match=r"correction, loss.clip_high = \('areal/decoupled', 0.28\).* clip_high: 0.2") as caught:
        config("areal/decoupled")
    assert caught.value.field == "correction, loss.clip_high"
    with pytest.raises(ConfigError, match="loss: any") as caught:
        config("areal/decoupled", "gspo")
    assert caught.value.field == "correction, loss.kind"
    with pytest.raises(ConfigError) as caught:
        config("areal/decoupled", loss_of("areal/decoupled") | {"aggregation": "token_sum"})
    assert caught.value.field == "correction, loss.aggregation"
    alone = config({"kind": "preset", "name": "areal/decoupled", "loss": "any"}, "gspo")
    assert alone.build_correction() == preset("areal/decoupled")


@pytest.mark.parametrize(("given", "told"), [("areal/decupled", "areal/decoupled"), ("token_tiss", "token_tis"), ("custm", "custom")])
def test_an_unknown_name_is_shown_the_nearest_kind_or_preset(given: str, told: str) -> None:
    with pytest.raises(ConfigError, match=f"Did you mean '{told}'") as caught:
        config(given)
    assert caught.value.field == "correction.kind"
    if "/" in told:
        with pytest.raises(ConfigError, match=f"Did you mean '{told}'") as caught:
            config({"kind": "preset", "name": given})
        assert caught.value.field == "correction.name"


def test_a_custom_correction_has_every_field_of_a_correction_with_its_default() -> None:
    fields = {field.name: field.default for field in dataclasses.fields(Correction)}
    assert {name: field.default for name, field in CustomCorrection.model_fields.items() if name != "kind"} == fields
    assert config("custom").build_correction() == Correction()


def test_rules_are_a_list_of_kinds() -> None:
    given = ["veto", {"kind": "geometric", "low": 0.9, "high": 1.1}, {"kind": "second_moment", "form": "tau"},
             {"kind": "bounds", "statistic": "k3", "high": [0.1, 0.2], "drop": "away"}]
    assert config({"kind": "custom", "reject": given}).build_correction().reject == (
        veto(), geometric(low=0.9, high=1.1), SecondMoment(form="tau"), Bounds(statistic="k3", high=(0.1, 0.2), drop="away"))


@pytest.mark.parametrize(("given", "field"), [
    ({"reject": ["veto", {"kind": "geometric", "low": 1.2, "high": 1.1}]}, "correction.reject.1.low, correction.reject.1.high"),
    ({"reject": [{"kind": "bounds", "statistic": "k1", "level": "turn", "low": [1.0]}]},
     "correction.reject.0.low, correction.reject.0.level"),
    ({"reject": [{"kind": "bounds", "statistic": "k1", "loww": 1.0}]}, "correction.reject.0.loww"),
    ({"reject": ["vetoo"]}, "correction.reject.0.kind"), ({"reject": ["veto", "veto"]}, "correction.reject"),
    ({"truncate_high": [2.0, 0.0]}, "correction.truncate_high.1"), ({"truncate_high": []}, "correction.truncate_high"),
    ({"mask_low": 2.0, "mask_high": 1.0}, "correction.mask_low, correction.mask_high"),
    ({"level": "none", "truncate_high": 2.0}, "correction.truncate_high, correction.level"),
    ({"proximal": "log_linear", "reject": ["veto"]}, "correction.proximal, correction.reject")])
def test_a_wrong_custom_correction_is_told_where_it_is_wrong(given: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config({"kind": "custom"} | given)
    assert caught.value.field == field


@pytest.mark.parametrize("section", members_of(LossConfig), ids=lambda section: kinds_of(section)[0])
def test_a_loss_section_has_the_arguments_of_its_function_with_their_defaults(section: type) -> None:
    kind = kinds_of(section)[0]
    parameters = inspect.signature(_FUNCTIONS[kind]).parameters.values()
    assert config("none", kind).loss.arguments == {
        parameter.name: parameter.default for parameter in parameters if parameter.name not in ("logprobs", "inputs", *FOUND)}


FOUND = ("tau", "group_expectation")
"""What is found on the whole batch."""
ANCHORED_AT_ROLLOUT = ("ppo", "importance_sampling", "dppo_tv", "dppo_kl", "prime_rl_dppo", "prime_rl_ipo", "m2po", "gepo", "vespo", "dro")


@pytest.mark.parametrize("kind", [kinds_of(section)[0] for section in members_of(LossConfig)])
def test_a_loss_against_the_rollout_policy_takes_rejection_and_no_weights(kind: str) -> None:
    config({"kind": "custom", "level": "none", "mask_high": 2.0, "reject": ["veto"]}, kind)
    for weighing in ("token_tis", "icepop", {"kind": "custom", "level": "none", "proximal": "log_linear"}):
        if kind in ANCHORED_AT_ROLLOUT:
            with pytest.raises(ConfigError) as caught:
                config(weighing, kind)
            assert caught.value.field == "loss.kind, correction.kind"
        else:
            config(weighing, kind)


def test_a_dual_clip_lies_outside_the_clip() -> None:
    with pytest.raises(ConfigError) as caught:
        config("none", {"kind": "ppo", "clip_high": 0.5, "dual_clip": 1.4})
    assert caught.value.field == "loss.dual_clip, loss.clip_high"


@pytest.mark.parametrize(("correction", "updates", "expected"), [
    ("token_tis", 1, False), ("token_tis", 2, True), ({"kind": "custom", "level": "sequence"}, 1, True),
    ({"kind": "custom", "denominator": "kept", "mask_high": 2.0}, 1, True), ({"kind": "custom", "proximal": "log_linear"}, 4, False)])
def test_a_proximal_pass_is_made_where_the_forward_that_trains_is_not_enough(correction: object, updates: int, expected: bool) -> None:
    assert config(correction, epochs=updates).has_proximal_pass == expected


@pytest.mark.parametrize("kind", ["m2po", "gepo"])
def test_a_loss_that_looks_at_the_batch_has_a_proximal_pass(kind: str) -> None:
    assert config("none", kind).has_proximal_pass
