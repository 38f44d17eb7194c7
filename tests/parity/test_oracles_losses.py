"""Any numbers, shapes and settings of the kinds of cases about losses, against plain NumPy."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.parity import oracles, oracles_losses, reference_losses
from tests.parity.test_oracles import assert_agrees
from tests.parity.test_oracles_advantages import as_lists


def test_every_kind_has_a_reference_of_its_own() -> None:
    assert set(oracles_losses.CASES) == set(reference_losses.KINDS)


@settings(derandomize=True)  # a random number may fall within rounding of a bound, where the two rightly differ
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 2e-5)])
@pytest.mark.parametrize("name", list(reference_losses.KINDS))
@given(seed=st.integers(0, 2**32 - 1))
def test_any_case_of_a_kind_agrees_with_the_reference(name: str, dtype: torch.dtype, tolerance: float, seed: int) -> None:
    case = reference_losses.case_of(name, seed)
    assert_agrees(oracles.evaluate(name, case["inputs"], dtype), as_lists(case["expected"]), tolerance=tolerance, path=f"{name}({seed})")
