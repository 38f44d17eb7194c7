"""Answers numerical cases through the public API of `asyncrl.correction`.

A case has padded inputs [N, L] with anything under the mask, and expected values by name. `evaluate` returns those names.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch

PARTS = ("oracles_weights", "oracles_losses", "oracles_diagnostics", "oracles_advantages")
"""Modules of this folder; each has its kinds of cases in `CASES`, by name."""
_ROOT = str(Path(__file__).parents[2])


def evaluate(name: str, inputs: dict[str, Any], dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """What the library says about a case, under the case's own names. Raises KeyError for a kind it does not cover."""
    if _ROOT not in sys.path:  # where this file alone was loaded, by its path
        sys.path.insert(0, _ROOT)
    kinds = {kind: answer for part in PARTS for kind, answer in importlib.import_module(f"tests.parity.{part}").CASES.items()}
    return kinds[name](inputs, dtype)
