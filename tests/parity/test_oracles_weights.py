"""Any numbers and shapes of the kinds of cases about weights and rejection, against plain NumPy."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.parity import oracles_weights, reference_weights
from tests.parity.test_oracles import assert_any_case_agrees


def test_every_kind_has_a_reference_here_or_among_the_stored_cases() -> None:
    stored = {"decoupled_ppo_token_tis", "decoupled_ppo_token_mask_denominators", "identity_prox_equals_behave", "numerics_overflow"}
    assert set(oracles_weights.CASES) == set(reference_weights.KINDS) | stored


@settings(derandomize=True)  # a random ratio may fall within rounding of a bound, where the two rightly differ
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 2e-5)])
@pytest.mark.parametrize("name", list(reference_weights.KINDS))
@given(seed=st.integers(0, 2**32 - 1))
def test_any_case_of_a_kind_agrees_with_the_reference(name: str, dtype: torch.dtype, tolerance: float, seed: int) -> None:
    assert_any_case_agrees(reference_weights, name, seed=seed, dtype=dtype, tolerance=tolerance)
