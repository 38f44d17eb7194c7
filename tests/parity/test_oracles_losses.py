"""Any numbers, shapes and settings of the kinds of cases about losses, against plain NumPy."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.parity import oracles_losses, reference_losses
from tests.parity.test_oracles import assert_any_case_agrees


def test_every_kind_has_a_reference_of_its_own() -> None:
    assert set(oracles_losses.CASES) == set(reference_losses.KINDS)


@settings(derandomize=True)  # a random number may fall within rounding of a bound, where the two rightly differ
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 2e-5)])
@pytest.mark.parametrize("name", list(reference_losses.KINDS))
@given(seed=st.integers(0, 2**32 - 1))
def test_any_case_of_a_kind_agrees_with_the_reference(name: str, dtype: torch.dtype, tolerance: float, seed: int) -> None:
    assert_any_case_agrees(reference_losses, name, seed=seed, dtype=dtype, tolerance=tolerance)
