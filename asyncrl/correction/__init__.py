"""Off-policy correction as pure functions of tensors.

`Correction`, its rules, `preset` and `presets` need no torch. The names that handle tensors are brought in on first use, so
that a process which only reads a configuration never loads torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from asyncrl.correction.presets import Preset, preset, presets
from asyncrl.correction.rules import Bounds, SecondMoment
from asyncrl.correction.spec import Correction

if TYPE_CHECKING:
    from asyncrl.correction.batch import Corrected, CorrectionBatch
    from asyncrl.correction.policy_loss import LossInputs, PolicyLoss
    from asyncrl.correction.weights import correct, weigh

__all__ = ["Bounds", "Corrected", "Correction", "CorrectionBatch", "LossInputs", "PolicyLoss", "Preset", "SecondMoment", "correct",
           "preset", "presets", "weigh"]


def __getattr__(name: str) -> Any:
    homes = {"CorrectionBatch": "batch", "Corrected": "batch", "LossInputs": "policy_loss", "PolicyLoss": "policy_loss",
             "correct": "weights", "weigh": "weights"}
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{homes[name]}"), name)
