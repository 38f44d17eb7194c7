import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tests.parity import oracles, reference

HERE = Path(__file__).parent
CASES = json.loads((HERE / "data" / "correction.json").read_text())


def assert_agrees(got: Any, wanted: Any, *, tolerance: float, path: str) -> None:
    """Equal names, shapes and booleans; numbers within an absolute plus relative tolerance."""
    if isinstance(wanted, dict):
        assert got.keys() == wanted.keys(), path
        for name in wanted:
            assert_agrees(got[name], wanted[name], tolerance=tolerance, path=f"{path}.{name}")
    elif isinstance(wanted, list) and any(isinstance(item, list) for item in wanted):
        assert len(got) == len(wanted), path
        for n, (one, other) in enumerate(zip(got, wanted, strict=True)):
            assert_agrees(one, other, tolerance=tolerance, path=f"{path}[{n}]")
    else:
        np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance, err_msg=path)


def assert_any_case_agrees(drawn_by: ModuleType, name: str, *, seed: int, dtype: torch.dtype, tolerance: float) -> None:
    """A case of this kind that the plain NumPy reference draws from the seed."""
    case = drawn_by.case_of(name, seed)
    got = oracles.evaluate(name, case["inputs"], dtype)
    assert_agrees(got, as_lists(case["expected"]), tolerance=tolerance, path=f"{name}({seed})")


def as_lists(value: Any) -> Any:
    """Arrays in a case as a file would hold them."""
    if isinstance(value, dict):
        return {name: as_lists(item) for name, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 2e-5)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_the_public_api_agrees_with_the_numpy_reference(case: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    got = oracles.evaluate(case["name"], case["inputs"], dtype)
    assert_agrees(got, case["expected"], tolerance=tolerance, path=case["name"])


def test_the_stored_cases_are_what_the_reference_writes() -> None:
    fresh = reference.cases()
    assert [case["name"] for case in fresh] == [case["name"] for case in CASES]
    for new, stored in zip(fresh, CASES, strict=True):
        assert new["inputs"] == stored["inputs"]
        assert_agrees(new["expected"], stored["expected"], tolerance=1e-9, path=new["name"])


def test_an_unknown_kind_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="no_such_kind"):
        oracles.evaluate("no_such_kind", {})
