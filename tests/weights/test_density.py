"""The predicted density: grids of the published dtypes, the sample, and the law, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from asyncrl.weights.density import (
    Prediction,
    Travel,
    change_rates,
    density_ratio,
    sample_places,
    settled_updates,
    step_share,
    total_density,
    ulp,
)


@pytest.mark.parametrize(("value", "dtype", "distance"), [
    (1.0, "BF16", 2**-7), (1.99, "BF16", 2**-7), (2.0, "BF16", 2**-6), (-3.0, "BF16", 2**-6), (0.02, "BF16", 2**-13),
    (2.0**-126, "BF16", 2**-133), (1e-40, "BF16", 2**-133), (0.0, "BF16", 2**-133), (-0.0, "BF16", 2**-133),
    (1.0, "F32", 2**-23), (0.0, "F32", 2**-149), (1e-45, "F32", 2**-149),
    (1.0, "F16", 2**-10), (2.0**-14, "F16", 2**-24), (1e-6, "F16", 2**-24), (0.0, "F16", 2**-24)])
def test_the_distance_to_the_next_number_by_hand(value, dtype, distance):
    assert ulp(np.array([value], np.float32), dtype=dtype).tolist() == [distance]


@pytest.mark.parametrize(("dtype", "kind"), [("BF16", torch.bfloat16), ("F16", torch.float16), ("F32", torch.float32)])
def test_it_is_the_difference_of_neighbours_whose_bits_differ_by_one(dtype, kind):
    values = torch.from_numpy(np.random.default_rng(0).normal(0, 1, 1000) * 10.0 ** np.linspace(-8, 3, 1000)).to(kind).abs()
    words = values.view({2: torch.int16, 4: torch.int32}[values.element_size()])
    neighbours = (words + 1).view(kind)
    oracle = (neighbours.double() - values.double()).numpy()
    assert np.array_equal(ulp(values.float().numpy(), dtype=dtype), oracle)


def test_a_dtype_that_is_no_floating_point_has_no_distance():
    with pytest.raises(KeyError):
        ulp(np.ones(1, np.float32), dtype="I64")


def test_a_step_changes_a_value_with_the_share_it_is_of_the_distance():
    values = np.array([1.0, 0.02, 0.0], np.float32)  # 2^-7, 2^-13 and the smallest there is
    assert change_rates(values, dtype="BF16", steps=2**-14).tolist() == [2**-7, 0.5, 1.0]
    assert change_rates(values, dtype="BF16", steps=[2**-8, 0.0, 0.0]).tolist() == [0.5, 0.0, 0.0]


def test_a_value_drawn_anywhere_crosses_a_middle_as_often_as_the_law_says():
    random = np.random.default_rng(0)
    values = random.normal(0, 0.02, 200_000).astype(np.float32)
    moved = values + np.float32(2e-6)
    changed = (torch.from_numpy(values).bfloat16() != torch.from_numpy(moved).bfloat16()).double().mean().item()
    assert change_rates(values, dtype="BF16", steps=2e-6).mean() == pytest.approx(changed, rel=0.03)


def test_updates_of_one_rate_lead_as_far_as_their_number_to_the_power_of_0_7():
    travel = Travel()
    assert travel.length == 0
    for _ in range(4):
        travel = travel.after(1e-5)
    assert travel.length == pytest.approx(1e-5 * 4**0.7)
    assert 2.5 <= travel.length / 1e-5 <= 2.9


def test_an_update_without_learning_rate_leads_nowhere():
    assert Travel().after(1e-5).after(0.0).length == pytest.approx(1e-5)


def test_a_settled_step_is_a_fifth_of_the_learning_rate_where_it_was_measured():
    assert (step_share(0.9), settled_updates(0.9)) == (pytest.approx(0.2), 20)
    assert (step_share(0.0), settled_updates(0.0)) == (pytest.approx(0.2 * math.sqrt(19)), 2)
    assert settled_updates(0.99) == 200


@pytest.mark.parametrize("most", [64, 1000, 1 << 20])
def test_a_sample_is_in_proportion_ascending_and_inside(most):
    lengths = [100_000, 1, 0, 3000, 7]
    places = sample_places(lengths, most=most)
    for length, chosen in zip(lengths, places, strict=True):
        assert len(chosen) == min(length, math.ceil(length * most / sum(lengths)))
        assert (np.diff(chosen) >= 0).all()
        assert ((chosen >= 0) & (chosen < length)).all()
    assert sum(map(len, places)) <= most + len(lengths)
    assert all(np.array_equal(a, b) for a, b in zip(places, sample_places(lengths, most=most), strict=True))


def test_a_sample_prefers_no_column():
    places, = sample_places([512 * 512], most=4096)
    assert np.bincount(places % 512 // 64, minlength=8).min() > 450


def test_predictions_of_ranks_add_up_unless_one_cannot_tell():
    assert total_density([Prediction(changed=1.0, elements=10), Prediction(changed=2.0, elements=20)]) == pytest.approx(0.1)
    assert total_density([Prediction(changed=3.0, elements=30), Prediction(changed=0.0, elements=0)]) == pytest.approx(0.1)
    assert total_density([Prediction(changed=1.0, elements=10), None]) is None
    assert total_density([]) is None
    assert total_density([Prediction(changed=0.0, elements=0)]) is None


def test_a_change_where_nothing_moved_is_infinitely_many():
    assert density_ratio(0.3, predicted=0.1) == pytest.approx(3)
    assert density_ratio(0.0, predicted=0.0) == 1
    assert density_ratio(0.1, predicted=0.0) == math.inf
