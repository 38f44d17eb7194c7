"""A recipe as a workload, and a plan as a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrl.config import dump_config, load_config
from asyncrl.errors import ConfigError
from asyncrl.plan.step import StepPlan
from asyncrl.rollout.config import VLLMEngineConfig
from asyncrl.train.advantages_config import GAE
from asyncrl.train.prepare_config import ModelFolder
from asyncrl.train.reference_config import NoReference

BASE = "arithmetic/quickstart"
"""Whose model, task and sampling a derived recipe has, unless another one is named."""


def recipe_values(recipe: str) -> dict[str, Any]:
    """What a recipe says of a plan's inputs, by the names of the options; a model that a function makes is not among them."""
    config = load_config(recipe)
    engine, trainer, training = config.engine, config.trainer, config.training
    engine_gpus = engine.tensor_parallel_size if isinstance(engine, VLLMEngineConfig) else 1
    values: dict[str, Any] = {
        "prompts": config.buffer.groups_per_step, "group_size": config.buffer.group_size, "max_staleness": config.buffer.max_staleness,
        "max_tokens": config.sampling.max_new_tokens, "epochs": trainer.epochs, "minibatches": trainer.minibatches_per_step,
        "tensor_parallel": engine_gpus, "gpus": engine_gpus + max(1, trainer.processes),
        "reference": not isinstance(config.reference, NoReference), "proximal": training.has_proximal_pass,
        "has_critic": isinstance(config.advantages, GAE)}
    return values | ({"model": config.model.path} if isinstance(config.model, ModelFolder) else {})


def advised_settings(plan: StepPlan, *, base: str) -> list[str]:
    """The plan's batch, updates, staleness and placement, as settings on top of a recipe."""
    work, algorithm, chosen = plan.setup.workload, plan.setup.algorithm, plan.shapes[plan.best]
    is_async = plan.best == "async"
    staleness = algorithm.max_staleness if is_async else 1 if plan.best == "one_step" else 0
    settings = [f"buffer.groups_per_step={work.prompts}", f"buffer.group_size={work.group_size}", f"buffer.max_staleness={staleness}",
                f"trainer.minibatches_per_step={_divisor(work.prompts, algorithm.minibatches)}", f"trainer.epochs={algorithm.epochs}",
                f"trainer.processes={chosen.train_gpus}"]
    if plan.best == "colocated":
        settings.append("colocation.kind=turns")
    if isinstance(load_config(base).engine, VLLMEngineConfig):
        settings.append(f"engine.tensor_parallel_size={plan.setup.placement.tensor_parallel}")
    return settings


def write_recipe(path: Path, plan: StepPlan, *, base: str, notes: list[str]) -> None:
    """The base recipe with the plan's settings, checked as `asyncrl train` checks it, the derivation as comments above it.

    Raises ConfigError when the settings contradict one another or the base, or the file cannot be written.
    """
    config = load_config(base, advised_settings(plan, base=base))
    text = "".join(f"# {line}\n" if line else "#\n" for line in notes) + dump_config(config)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError("advise", value=str(path), allowed="a file that can be written", remedy=f"{error}.") from error


def _divisor(whole: int, wanted: int) -> int:
    """The largest divisor that is at most as many: minibatches are of whole groups."""
    return next(count for count in range(min(wanted, whole), 0, -1) if whole % count == 0)
