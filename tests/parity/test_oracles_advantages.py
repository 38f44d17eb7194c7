"""Other inputs of the same kinds than those in data/: any numbers and shapes, against the plain NumPy reference."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.parity import oracles_advantages, reference_advantages
from tests.parity.test_oracles import assert_any_case_agrees

KINDS = list(reference_advantages.KINDS)


def test_every_kind_has_a_reference_of_its_own() -> None:
    assert set(oracles_advantages.CASES) == set(KINDS)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 2e-5)])
@pytest.mark.parametrize("name", KINDS)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_case_of_a_kind_agrees_with_the_reference(name: str, dtype: torch.dtype, tolerance: float, seed: int) -> None:
    assert_any_case_agrees(reference_advantages, name, seed=seed, dtype=dtype, tolerance=tolerance)
