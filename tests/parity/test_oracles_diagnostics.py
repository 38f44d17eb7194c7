"""The split of the gap on any numbers, against plain NumPy. The metrics have their random batches in tests/correction."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.parity import oracles
from tests.parity.test_oracles import assert_agrees


def split_case(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    tokens = int(rng.integers(1, 30))
    rollout, same, proximal = (np.float32(-rng.exponential(1.0, tokens)).astype(float) for _ in range(3))
    versions = rng.integers(0, 21, tokens)
    total, staleness = proximal - rollout, 20 - versions
    return {"inputs": {"behave_logp": rollout.tolist(), "same_version_logp": same.tolist(), "prox_logp": proximal.tolist(),
                       "token_version": versions.tolist(), "current_version": 20},
            "expected": {"mismatch": (same - rollout).tolist(), "lag": (proximal - same).tolist(), "total": total.tolist(),
                         "staleness": staleness.tolist(), "mean_abs_log_ratio_by_staleness": {
                             f"{age}": float(np.abs(total)[staleness == age].mean()) for age in np.unique(staleness)}}}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 2e-5)])
@given(seed=st.integers(0, 2**32 - 1))
def test_any_split_of_the_gap_agrees_with_the_reference(dtype: torch.dtype, tolerance: float, seed: int) -> None:
    case = split_case(seed)
    got = oracles.evaluate("mismatch_vs_lag_split", case["inputs"], dtype)
    assert_agrees(got, case["expected"], tolerance=tolerance, path=f"mismatch_vs_lag_split({seed})")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 2e-5)])
def test_a_split_by_hand(dtype: torch.dtype, tolerance: float) -> None:
    got = oracles.evaluate("mismatch_vs_lag_split", {
        "behave_logp": [-1.0, -2.0, -0.5], "same_version_logp": [-1.25, -2.0, -0.5], "prox_logp": [-0.75, -1.0, -0.25],
        "token_version": [1, 3, 3], "current_version": 3}, dtype)
    assert_agrees(got, {"mismatch": [-0.25, 0.0, 0.0], "lag": [0.5, 1.0, 0.25], "total": [0.25, 1.0, 0.25], "staleness": [2, 0, 0],
                        "mean_abs_log_ratio_by_staleness": {"0": 0.625, "2": 0.25}}, tolerance=tolerance, path="by hand")
