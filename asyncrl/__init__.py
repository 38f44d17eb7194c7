"""Asynchronous off-policy RL post-training of language models, with every token accounted for.

Importing this starts nothing, needs no torch, and loads each public name when it is first used: children that need one
module do not pay for all of them.
"""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.buffer.replay_buffer import ReplayBuffer
    from asyncrl.config import RunConfig, load_config
    from asyncrl.loop import Run
    from asyncrl.rollout.engine import Interruption
    from asyncrl.rollout.env import Env, Outcome, Session, SingleTurn
    from asyncrl.rollout.eval_set import EvalSet
    from asyncrl.rollout.evaluation import Evaluation
    from asyncrl.rollout.inline_engine import InlineEngine
    from asyncrl.rollout.prompts import Mixture, PromptSource
    from asyncrl.rollout.task_config import ProbeConfig
    from asyncrl.rollout.transformers_engine import TransformersEngine
    from asyncrl.rollout.vllm_engine import VLLMEngine
    from asyncrl.run_options import RunOptions
    from asyncrl.step_report import StepReport
    from asyncrl.train.sft import SFTTrainer
    from asyncrl.train.trainer import Trainer
    from asyncrl.types import Prompt, Rollout, RolloutGroup, Sampling, Sequence, Status
    from asyncrl.weights.config import WeightsConfig

__all__ = [
    "Env", "EvalSet", "Evaluation", "InlineEngine", "Interruption", "Mixture", "Outcome", "ProbeConfig", "Prompt", "PromptSource",
    "ReplayBuffer", "Rollout", "RolloutGroup", "Run", "RunConfig", "RunOptions", "SFTTrainer", "Sampling", "Sequence", "Session",
    "SingleTurn", "Status", "StepReport", "Trainer", "TransformersEngine", "VLLMEngine", "WeightsConfig", "load_config",
]

_HOMES = MappingProxyType({
    "asyncrl.buffer.replay_buffer": ("ReplayBuffer",),
    "asyncrl.config": ("RunConfig", "load_config"),
    "asyncrl.loop": ("Run",),
    "asyncrl.rollout.engine": ("Interruption",),
    "asyncrl.rollout.env": ("Env", "Outcome", "Session", "SingleTurn"),
    "asyncrl.rollout.eval_set": ("EvalSet",),
    "asyncrl.rollout.evaluation": ("Evaluation",),
    "asyncrl.rollout.inline_engine": ("InlineEngine",),
    "asyncrl.rollout.prompts": ("Mixture", "PromptSource"),
    "asyncrl.rollout.task_config": ("ProbeConfig",),
    "asyncrl.rollout.transformers_engine": ("TransformersEngine",),
    "asyncrl.rollout.vllm_engine": ("VLLMEngine",),
    "asyncrl.run_options": ("RunOptions",),
    "asyncrl.step_report": ("StepReport",),
    "asyncrl.train.sft": ("SFTTrainer",),
    "asyncrl.train.trainer": ("Trainer",),
    "asyncrl.types": ("Prompt", "Rollout", "RolloutGroup", "Sampling", "Sequence", "Status"),
    "asyncrl.weights.config": ("WeightsConfig",),
})


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'asyncrl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
