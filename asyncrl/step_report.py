"""What a step tells whoever drives the run."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field

from asyncrl.types import Batch


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did. Reads like a mapping from metric name to number."""

    index: int
    """Number of the step, from 1."""
    version: int
    """Policy version the step made."""
    metrics: Mapping[str, float]
    batch: Batch = field(repr=False)

    def __getitem__(self, name: str) -> float:
        """Raises KeyError for a metric that was not measured in this step: a mean over nothing is absent."""
        if name not in self.metrics:
            near = difflib.get_close_matches(name, self.metrics)
            raise KeyError(f"{name!r} was not measured in step {self.index}; nearest of the {len(self.metrics)} that were: {near}")
        return self.metrics[name]
