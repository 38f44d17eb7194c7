"""Sections and flips of the optimizer: three real steps of the trainer must differ, or what its kernel is given."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from asyncrl.config import RunConfig
from asyncrl.train import optim
from tests import config_observers as see
from tests.config_flips import Flip, flip
from tests.config_observers import Scene


def kernel(config: RunConfig, scene: Scene) -> object:
    """Which kernel each update calls, and whether it gets the moments themselves or copies that visit the device."""
    calls: list[tuple[bool, bool]] = []
    step, adamw = optim.Optimizer._step, optim.adamw

    def stepping(self: optim.Optimizer, share: list[Any], **rate: float) -> None:
        home = {moment.data_ptr() for trained in share for moment in trained.moments}

        def called(*tensors: list[Tensor], fused: bool, **settings: Any) -> None:
            calls.append((fused, {moment.data_ptr() for moment in tensors[2]} <= home))
            adamw(*tensors, fused=fused, **settings)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(optim, "adamw", called)
            step(self, share, **rate)

    scene.patch.setattr(optim.Optimizer, "_step", stepping)
    see.trained(config, scene)
    return calls


GROUP = {"trainer__learning_rate_groups": [{"match": "norm", "factor": 2.0}]}
SECTIONS: dict[str, Any] = {"trainer.learning_rate_scale.ess": {"kind": "ess"}}
FLIPS: dict[str, Flip] = {
    "trainer.adamw": flip("foreach", kernel), "trainer.offload_optimizer": flip(True, kernel),
    "trainer.learning_rate_groups.match": flip("embed|lm_head", see.trained, **GROUP),
    "trainer.learning_rate_groups.factor": flip(0.5, see.trained, **GROUP),
    "trainer.learning_rate_groups.weight_decay": flip(0.1, see.trained, **GROUP),
    "trainer.frozen": flip(["norm"], see.trained),
    "trainer.learning_rate_scale.kind": flip({"kind": "ess", "reference": 1.0}, see.trained),
    "trainer.learning_rate_scale.ess.rule": flip("linear", see.trained, trainer__learning_rate_scale={"kind": "ess", "reference": 1.0}),
    "trainer.learning_rate_scale.ess.reference": flip(0.9, see.trained),
    "trainer.learning_rate_scale.ess.reference_updates": flip(4, see.trained)}
ACCEPTED: dict[str, set[str]] = {
    "zero": {"trainer.learning_rate_groups.weight_decay"},
    "large": {"trainer.learning_rate_scale.ess.reference_updates"},
    "null": {"trainer.learning_rate_groups.weight_decay", "trainer.learning_rate_scale.ess.reference"}}
"""What the numbers of these sections take of what `test_config_numbers` tries."""
