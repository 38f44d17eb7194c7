"""Off-policy correction as pure functions of tensors.

`Correction`, `preset` and `presets` need no torch. The names that handle tensors are brought in on first use, so that a
process which only reads a configuration never loads torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from asyncrl.correction.presets import Correction, preset, presets

if TYPE_CHECKING:
    from asyncrl.correction.batch import Corrected, CorrectionBatch
    from asyncrl.correction.weights import correct, weigh

__all__ = ["Corrected", "Correction", "CorrectionBatch", "correct", "preset", "presets", "weigh"]


def __getattr__(name: str) -> Any:
    homes = {"CorrectionBatch": "batch", "Corrected": "batch", "correct": "weights", "weigh": "weights"}
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{homes[name]}"), name)
