"""Means and differences over seeds, by hand and against NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.ablate.config import Ablation
from asyncrl.ablate.statistics import Estimate, Outcomes
from tests.ablate.scene import ABLATION


def outcomes(reference: dict[str, str] | None = None, **rewards: dict[int, float]) -> Outcomes:
    """Of points named RATE_ARM with a number a seed."""
    found = Outcomes(Ablation.model_validate(ABLATION | {"reference": reference or {}}))
    for name, values in rewards.items():
        rate, arm = name.split("_")
        for seed, value in values.items():
            found.add({"rate": f"0.0{rate[1:]}", "arm": arm}, seed, {"reward": value, "held-out": None})
    return found


def test_a_mean_has_its_standard_error() -> None:
    assert Estimate.of([1.0, 2.0, 6.0]) == Estimate(3.0, pytest.approx(math.sqrt(7.0 / 3.0)), 3)
    assert Estimate.of([4.0]) == Estimate(4.0, None, 1)
    assert Estimate.of([]) is None


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=8))
def test_means_are_those_of_numpy(values: list[float]) -> None:
    estimate = Estimate.of(values)
    assert estimate is not None
    assert estimate.mean == pytest.approx(np.mean(values), rel=1e-6, abs=1e-9)
    assert estimate.standard_error == pytest.approx(np.std(values, ddof=1) / np.sqrt(len(values)), rel=1e-6, abs=1e-9)


def test_differences_are_taken_seed_by_seed_so_that_what_seeds_share_cancels() -> None:
    found = outcomes(r1_plain={0: 1.0, 1: 5.0, 2: 9.0}, r1_corrected={0: 1.5, 1: 5.5, 2: 9.5})
    (difference,) = found.differences("reward", axis="arm")
    assert (difference.point, difference.reference) == ({"rate": "0.01", "arm": "corrected"}, "plain")
    assert difference.estimate == Estimate(0.5, 0.0, 3)


def test_a_seed_that_one_of_the_two_lacks_is_left_out_of_the_difference() -> None:
    found = outcomes(r1_plain={0: 1.0, 1: 5.0}, r1_corrected={1: 7.0, 2: 100.0})
    assert [one.estimate for one in found.differences("reward", axis="arm")] == [Estimate(2.0, None, 1)]
    assert outcomes(r1_plain={0: 1.0}, r1_corrected={1: 7.0}).differences("reward", axis="arm") == []


def test_each_axis_is_compared_at_each_point_of_the_others_with_its_own_reference() -> None:
    found = outcomes({"rate": "0.02"}, r1_plain={0: 1.0}, r2_plain={0: 4.0}, r1_corrected={0: 2.0}, r2_corrected={0: 8.0})
    seen = {axis: {(one.point["rate"], one.point["arm"]): one.estimate.mean for one in found.differences("reward", axis=axis)}
            for axis in ("rate", "arm")}
    assert seen == {"rate": {("0.01", "plain"): -3.0, ("0.01", "corrected"): -6.0},
                    "arm": {("0.01", "corrected"): 1.0, ("0.02", "corrected"): 4.0}}


def test_what_was_not_measured_has_no_mean() -> None:
    assert outcomes(r1_plain={0: 1.0}).estimate({"rate": "0.01", "arm": "plain"}, "held-out") is None
