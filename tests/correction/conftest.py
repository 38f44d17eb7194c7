"""A batch to start from: three packed sequences with garbage wherever the mask is off."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from asyncrl.correction import CorrectionBatch

NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="session")
def packed() -> Callable[..., CorrectionBatch]:
    """Sequences of 4, 3 and 2 tokens; the first token of each is masked and holds NaN, infinity or a positive logprob."""
    base = CorrectionBatch(
        rollout_logprobs=torch.tensor([NAN, -1.0, -2.0, -0.5, INF, -1.0, -0.7, 3.0, -0.9]),
        proximal_logprobs=torch.tensor([0.5, -0.9, -1.0, -0.5, -INF, -2.0, -0.6, NAN, -3.0]),
        advantages=torch.tensor([NAN, 1.0, 1.0, 1.0, INF, -1.0, -1.0, NAN, 0.5]),
        loss_mask=torch.tensor([0, 1, 1, 1, 0, 1, 1, 0, 1], dtype=torch.bool),
        turn_ids=torch.tensor([-1, 0, 0, 1, -1, 0, 0, -1, 0], dtype=torch.int16),
        policy_versions=torch.tensor([-1, 3, 3, 4, -1, 5, 5, -1, 5], dtype=torch.int32),
        cu_seqlens=torch.tensor([0, 4, 7, 9]), group_ids=torch.tensor([0, 0, 1]), version=5)

    def make(**changes: Any) -> CorrectionBatch:
        return dataclasses.replace(base, **changes)

    return make
