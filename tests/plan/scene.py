"""The setups that the tests of plans share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asyncrl.plan.hardware import hardware_named
from asyncrl.plan.lengths import Lengths, Lognormal, MeanMax
from asyncrl.plan.models import model_named
from asyncrl.plan.phases import Setup
from asyncrl.plan.workload import Algorithm, Placement, Workload

REFERENCE_LENGTHS = MeanMax(8192, 32_768)


def reference(lengths: Lengths = REFERENCE_LENGTHS, **placement: Any) -> Setup:
    """8B on 64 H100, 512 prompts × 16."""
    work = Workload(prompts=512, group_size=16, prompt_tokens=500, lengths=lengths)
    return Setup(model=model_named("llama-3-8b"), hardware=hardware_named("h100"), workload=work, algorithm=Algorithm(),
                 placement=replace(Placement(gpus=64), **placement))


def spread(**placement: Any) -> Setup:
    """The same with log-normal lengths, split in nodes."""
    return reference(Lognormal(8192, 32_768), **{"unit_gpus": 8, **placement})
