import dataclasses
import importlib
import inspect
import subprocess
import sys

import numpy as np
import pytest
import torch

from asyncrl.correction import Correction, CorrectionBatch, preset, presets, weigh
from asyncrl.correction.aggregate import Denominators, scale
from asyncrl.correction.formula import formula, kept_text, weight_text
from asyncrl.correction.rules import Bounds, SecondMoment
from asyncrl.errors import ConfigError
from asyncrl.train.config import validated
from tests.correction.preset_reference import ORIGINS, Case
from tests.parity.oracles import PARTS
from tests.parity.test_peers import COVERED

HOMES = ("losses", "sequence_losses", "catalog")
NEVER = {"none", "verl/disabled", "verl/bypass_ppo_clip", "areal/decoupled_unweighted", "areal/loglinear", "prime_rl/dppo", "prime_rl/ipo"}
ANSWERED = {kind for part in PARTS for kind in importlib.import_module(f"tests.parity.{part}").CASES}
"""Oracle cases that the library's public API is held to."""
each_preset = pytest.mark.parametrize("name", presets())


def drawn(seed: int) -> tuple[Case, CorrectionBatch]:
    """Sequences whose ℓ reaches from hardly anything to wild: each bound of each preset has something on either side of it."""
    rng = np.random.default_rng(seed)
    shape, scales = (60, 9), np.geomspace(1e-4, 4.0, 60)[:, None]
    mask = (rng.random(shape) > 0.3).astype(float)
    mask[-1] = 0.0  # a sequence without loss tokens
    proximal = -0.3 - rng.random(shape)
    rollout = np.minimum(proximal - rng.normal(size=shape) * scales, -0.01)
    advantages = rng.normal(size=(60, 1)) * np.ones(shape)
    case = Case(log_ratio=proximal - rollout, mask=mask, p=np.exp(proximal), q=np.exp(rollout), advantages=advantages)
    rollout[mask == 0], proximal[mask == 0] = np.nan, np.inf
    batch = CorrectionBatch(
        rollout_logprobs=torch.from_numpy(rollout.ravel()), proximal_logprobs=torch.from_numpy(proximal.ravel()),
        advantages=torch.from_numpy(advantages.ravel().copy()), loss_mask=torch.from_numpy(mask.ravel() > 0),
        turn_ids=torch.zeros(mask.size, dtype=torch.int16), policy_versions=torch.zeros(mask.size, dtype=torch.int32),
        cu_seqlens=torch.arange(61) * 9, group_ids=torch.arange(60) // 4, version=1)
    return case, batch


@each_preset
@pytest.mark.parametrize("seed", range(5))
def test_a_preset_weighs_and_counts_as_its_origin_does(name: str, seed: int) -> None:
    case, batch = drawn(seed)
    weights, counted = ORIGINS[name](case)
    got = weigh(batch, preset(name))
    np.testing.assert_allclose(got.weights.numpy(), weights.ravel(), rtol=1e-9, atol=0)
    np.testing.assert_array_equal(got.counted.numpy(), counted.ravel() > 0)


def test_the_batches_of_that_test_reach_every_bound() -> None:
    """Each preset that can cut does, somewhere, and spares something."""
    for name in presets():
        results = [(weigh(batch, preset(name)), batch.loss_mask) for _, batch in map(drawn, range(5))]
        cuts = any(bool((got.weights != 1.0)[mask].any()) for got, mask in results)
        spares = any(bool((got.weights > 0)[mask].any()) for got, mask in results)
        assert cuts == (name not in NEVER), name
        assert spares, name


@pytest.mark.parametrize(("log_ratio", "stays"), [(np.log(1 / 1.001) + 1e-9, True), (np.log(0.999) + 1e-9, False),
                                                  (np.log(1 / 0.999) - 1e-9, True), (np.log(1 / 0.999) + 1e-9, False)])
def test_verl_bounds_the_inverse_of_the_geometric_mean(log_ratio: float, stays: bool) -> None:
    _, batch = drawn(0)
    batch = dataclasses.replace(batch, proximal_logprobs=batch.rollout_logprobs + log_ratio)
    for name in ("verl/decoupled_geo_rs", "verl/bypass_pg_geo_rs_token_tis"):
        assert bool(weigh(batch, preset(name)).keep_mask.any()) == stays


def test_verl_has_its_nineteen() -> None:
    assert sum(name.startswith("verl/") for name in presets()) == 19


def test_every_project_is_there() -> None:
    assert {name.split("/")[0] for name in presets() if "/" in name} == {
        "verl", "areal", "slime", "trl", "prime_rl", "skyrl", "nemo_rl", "openrlhf"}


@each_preset
def test_the_evidence_of_a_preset_exists(name: str) -> None:
    assert preset(name).evidence
    for entry in preset(name).evidence:
        kind, _, place = entry.partition(" ")
        if kind == "oracle":
            assert place in ANSWERED, entry
        else:
            assert kind == "parity", entry
            assert place in COVERED, entry


@each_preset
def test_the_loss_of_a_preset_is_a_function_that_takes_its_settings(name: str) -> None:
    known = preset(name)
    homes = [importlib.import_module(f"asyncrl.correction.{home}") for home in HOMES]
    (function,) = {getattr(home, known.loss) for home in homes if hasattr(home, known.loss)}
    assert set(dict(known.loss_settings)) <= set(inspect.signature(function).parameters)
    assert scale(Denominators(10, 2), mode=known.aggregation) > 0


@each_preset
def test_a_preset_with_its_loss_is_a_setting_of_the_trainer(name: str) -> None:
    known = preset(name)
    loss = {"kind": known.loss, "aggregation": known.aggregation, **dict(known.loss_settings)}
    tree = {"trainer": {"learning_rate": 1e-3}, "correction": {"kind": "preset", "name": name}}
    assert validated(tree | {"loss": loss}).build_correction() == known


@each_preset
def test_a_preset_says_where_it_comes_from(name: str) -> None:
    known = preset(name)
    assert known.name == name
    assert known.origin
    assert known.departs
    assert ("/" not in name) or known.paper


def test_a_formula_is_made_of_the_fields() -> None:
    correction = Correction(level="sequence", reduce="mean", truncate_low=0.5, truncate_high=2.0, mask_high=10.0, normalize="sequence",
                            denominator="kept", reject=(Bounds(statistic="k3", level="turn", reduce="max", high=0.1, drop="away"),
                                                        SecondMoment(limit=0.05, form="tau")))
    assert formula(correction) == [
        "ℓ = proximal − rollout, r = e^ℓ, |ℓ| held to 20 before exp",
        "keep    where geometric mean of r over the sequence ≤ 10",
        "drop    tokens with ℓ·A > 0 of turns unless largest e^ℓ − 1 − ℓ of the turn ≤ 0.1",
        "drop    tokens with ℓ·A > 0 and |ℓ| > τ, where Σ min(ℓ², τ²) = 0.05 · n over the n tokens with ℓ·A > 0",
        "weight  clip(geometric mean of r over the sequence, 0.5, 2) where kept, else 0",
        "        divided by the mean weight of sequences",
        "over    tokens that are kept"]


def test_a_bound_by_staleness_shows_every_number() -> None:
    correction = Correction(truncate_high=(2.0, 1.5, 1.2), mask_low=0.1)
    assert weight_text(correction) == "min(r, [2, 1.5, 1.2 by staleness])"
    assert kept_text(correction) == "0.1 ≤ r"
    assert weight_text(Correction(truncate_low=0.5)) == "max(r, 0.5)"
    assert weight_text(Correction(level="none")) == "1"
    assert kept_text(Correction()) == "all"


def test_presets_have_the_bounds_of_their_papers() -> None:
    assert preset("token_tis").truncate_high == 2.0
    assert (preset("icepop").mask_low, preset("icepop").mask_high) == (0.5, 5.0)
    assert preset("none").level == "none"
    assert all(preset(name).log_clamp == 20.0 for name in presets())


@pytest.mark.parametrize(("name", "nearest"), [("token_tsi", "token_tis"), ("areal/decopled", "areal/decoupled"),
                                               ("openrlhf/seq-mask-tis", "openrlhf/seq_mask_tis"),
                                               *((name.upper(), name) for name in presets())])
def test_unknown_preset_names_its_nearest_neighbour(name: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"Did you mean '{nearest}'") as caught:
        preset(name)
    assert nearest in caught.value.allowed


@pytest.mark.parametrize(("fields", "field"), [
    ({"level": "sentence"}, "correction.level"),
    ({"truncate_high": -1.0}, "correction.truncate_high"),
    ({"truncate_high": float("nan")}, "correction.truncate_high"),
    ({"truncate_high": 1e9}, "correction.truncate_high"),
    ({"mask_low": 0.0}, "correction.mask_low"),
    ({"mask_low": 2.0, "mask_high": 0.5}, "correction.mask_low, correction.mask_high"),
    ({"level": "none", "truncate_high": 2.0}, "correction.truncate_high, correction.level"),
    ({"log_clamp": 0.0}, "correction.log_clamp"),
    ({"log_clamp": 80.0}, "correction.log_clamp"),
])
def test_bounds_that_cannot_work_are_refused_by_name(fields: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Correction(**fields)
    assert caught.value.field == field


def test_reading_presets_and_advantages_loads_no_torch() -> None:
    code = ("import sys, asyncrl.correction.presets, asyncrl.correction.advantages, asyncrl.correction.formula\n"
            "from asyncrl.correction import preset; preset('icepop')\n"
            "assert 'torch' not in sys.modules, 'torch was imported'\n"
            "from asyncrl.correction import correct\n"
            "assert 'torch' in sys.modules and callable(correct)\n")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={"PYTHONPATH": ":".join(p for p in sys.path if p)})
