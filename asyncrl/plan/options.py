"""The options of `asyncrl plan`, and the setup they describe."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.plan.hardware import HARDWARE, Hardware, hardware_named
from asyncrl.plan.lengths import Histogram, Lengths, Lognormal, MeanMax
from asyncrl.plan.models import model_named
from asyncrl.plan.phases import Setup
from asyncrl.plan.sync import LAYOUTS
from asyncrl.plan.workload import Algorithm, Placement, Workload

_ROLLOUTS = "rollouts.jsonl"
_FLAGS = {"no_reference": "no forward of the initial model", "no_proximal": "no forward of the policy before its first update",
          "reward_model": "a forward of a reward model of the policy's size", "critic": "PPO: a critic of the policy's size"}
DEFAULTS: dict[str, Any] = {"prompts": 512, "group_size": 16, "prompt_tokens": 500.0, "mean_tokens": 8192.0, "max_tokens": 32_768,
                            "epochs": 1, "minibatches": 4, "max_staleness": 4, "tensor_parallel": 1}
"""Of what neither an option nor a recipe says."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `asyncrl plan` takes. An option that is left out is the recipe's, and without one the default's."""
    parser.add_argument("--model", help="a model by name, a config.json, or a folder that holds one; needed without a recipe")
    parser.add_argument("--gpus", type=int, help="devices of the whole run; needed without a recipe")
    parser.add_argument("--recipe", metavar="X.yaml", help="plan this recipe: its batch, algorithm and engine")
    parser.add_argument("--hardware", default="h100", help=f"{', '.join(HARDWARE)}, or custom with the next three")
    for name, text in (("peak-tflops", "dense, in the dtype of training"), ("memory-gb", "of a device"),
                       ("bandwidth-tb-s", "of its memory")):
        parser.add_argument(f"--{name}", type=float, help=text)
    parser.add_argument("--gpus-per-node", type=int, help="of the hardware; 8")
    parser.add_argument("--lengths", default="lognormal", metavar="KIND",
                        help="lognormal; deck: the reference's mean and maximum alone; or a run's folder, whose answers are counted")
    parser.add_argument("--sigma", type=float, default=0.8, help="of lognormal lengths")
    for name, text in (("prompts", "of a step"), ("group-size", "rollouts of a prompt"), ("max-tokens", "of an answer, at most"),
                       ("epochs", "over a batch"), ("minibatches", "updates an epoch"), ("max-staleness", "batches in flight, async"),
                       ("tensor-parallel", "GPUs of an engine"), ("unit-gpus", "pools are split in multiples of it; a node")):
        parser.add_argument(f"--{name}", type=int, help=text)
    parser.add_argument("--prompt-tokens", type=float, help="of a prompt, on average")
    parser.add_argument("--mean-tokens", type=float, help="of an answer, on average")
    parser.add_argument("--turns", type=int, default=1, help="of a rollout")
    for name, text in (("environment-tokens", "the environment adds in a turn"), ("environment-s", "the environment takes for a turn")):
        parser.add_argument(f"--{name}", type=float, default=0.0, help=text)
    parser.add_argument("--environment-cores", type=float, default=1.0, help="of a sandbox")
    for name, text in _FLAGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=text)
    parser.add_argument("--syncs-per-step", type=int, default=1, help="weight updates of the engines in a step, asynchronously")
    parser.add_argument("--gpu-memory-utilization", type=float, help="of weights, KV cache and activations; an engine alone on its device")
    parser.add_argument("--transport", default="single_source", help="single_source, multi_source or delta")
    parser.add_argument("--layout", default="none", help=f"of the trainer's weights: {', '.join(LAYOUTS)}")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--plot", metavar="FOLDER", help="write waterfall.png, shapes.png and staleness.png there")
    parser.add_argument("--advise", metavar="FILE", help="derive a configuration in six steps and write it as a recipe")


def setup_of(options: argparse.Namespace) -> Setup:
    """What the options, the recipe behind them, and the defaults say. Raises ConfigError for what is missing or cannot be."""
    stated = _recipe_values(options)
    given = {**DEFAULTS, **stated, **{name: value for name, value in vars(options).items() if value is not None}}
    for needed, example in (("model", "llama-3-8b"), ("gpus", "64")):
        if given.get(needed) is None:
            raise ConfigError(needed, value=None, allowed="a value", remedy=f"Add --{needed} {example}.")
    hardware = _hardware(options)
    lengths = _lengths(options, given)
    workload = Workload(prompts=given["prompts"], group_size=given["group_size"], prompt_tokens=given["prompt_tokens"], lengths=lengths,
                        turns=options.turns, environment_tokens=options.environment_tokens, environment_s=options.environment_s,
                        environment_cores=options.environment_cores)
    algorithm = Algorithm(reference=stated.get("reference", True) and not options.no_reference,
                          proximal=stated.get("proximal", True) and not options.no_proximal,
                          reward_model=options.reward_model, critic=stated.get("has_critic", False) or options.critic,
                          epochs=given["epochs"], minibatches=given["minibatches"], syncs_per_step=options.syncs_per_step,
                          max_staleness=given["max_staleness"])
    placement = Placement(gpus=given["gpus"], tensor_parallel=given["tensor_parallel"], transport=options.transport, layout=options.layout,
                          gpu_memory_utilization=options.gpu_memory_utilization)
    unit = options.unit_gpus or _unit(placement, hardware, lengths)
    return Setup(model=model_named(given["model"]), hardware=hardware, workload=workload, algorithm=algorithm,
                 placement=replace(placement, unit_gpus=unit))


def lengths_of_run(path: Path) -> Histogram:
    """Of the answers a run has written to rollouts.jsonl: their sampled tokens. Raises ConfigError where there are none."""
    file = path / _ROLLOUTS if path.is_dir() else path
    try:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        lengths = [sum(row["loss_mask"]) for row in rows if row.get("error") is None]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError("lengths", value=str(path), allowed=f"lognormal, deck, or a run's folder with {_ROLLOUTS}",
                          remedy=f"Reading failed: {type(error).__name__}: {error}") from error
    return Histogram.of([length for length in lengths if length > 0])


def _recipe_values(options: argparse.Namespace) -> dict[str, Any]:
    if options.recipe is None:
        return {}
    from asyncrl.plan.recipe import recipe_values

    return recipe_values(options.recipe)


def _lengths(options: argparse.Namespace, given: dict[str, Any]) -> Lengths:
    mean = min(given["mean_tokens"], given["max_tokens"] / 2) if options.mean_tokens is None else options.mean_tokens
    if options.lengths == "deck":
        return MeanMax(mean, given["max_tokens"])
    if options.lengths == "lognormal":
        return Lognormal(mean, given["max_tokens"], sigma=options.sigma)
    return lengths_of_run(Path(options.lengths))


def _hardware(options: argparse.Namespace) -> Hardware:
    custom = {"peak_tflops": options.peak_tflops, "memory_gb": options.memory_gb, "bandwidth_tb_s": options.bandwidth_tb_s}
    if options.hardware == "custom":
        if missing := [f"--{name.replace('_', '-')}" for name, value in custom.items() if value is None]:
            raise ConfigError("hardware", value="custom", allowed="its peak, memory and bandwidth", remedy=f"Add {', '.join(missing)}.")
        found = Hardware(name="custom", peak_flop_s=options.peak_tflops * 1e12, memory_bytes=options.memory_gb * 1e9,
                         memory_bytes_s=options.bandwidth_tb_s * 1e12)
    elif any(value is not None for value in custom.values()):
        raise ConfigError("hardware", value=options.hardware, allowed="custom, where its numbers are given",
                          remedy="Add --hardware custom.")
    else:
        found = hardware_named(options.hardware)
    return found if options.gpus_per_node is None else replace(found, gpus_per_node=options.gpus_per_node)


def _unit(placement: Placement, hardware: Hardware, lengths: Lengths) -> int:
    """A node, where there are two and they are whole; engines otherwise. The reference splits single GPUs."""
    node, gpus = math.lcm(hardware.gpus_per_node, placement.tensor_parallel), placement.gpus
    return node if not lengths.is_reference and gpus >= 2 * node and gpus % node == 0 else placement.tensor_parallel
