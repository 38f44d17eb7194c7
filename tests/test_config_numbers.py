"""A number is checked where it is written: each numeric field of each section gets values that make no sense, and refuses them by name.

What is accepted all the same is listed here, knowingly.
"""

from __future__ import annotations

import copy
import math
from typing import Any, get_args

import pytest

from asyncrl.config import RunConfig, parse_config
from asyncrl.errors import ConfigError
from asyncrl.settings import kinds_of, members_of
from tests import algorithm_flips, lora_flips, optimizer_flips
from tests.test_config_effects import FIELDS, FLIPS, HERE, SECTIONS, SHAPED, TREE, put

SENSELESS: dict[str, Any] = {"zero": 0, "minus": -1, "large": 10**12, "huge": 10**30, "nan": math.nan, "infinite": math.inf,
                             "text": "1", "null": None, "true": True, "list": [1]}


def annotation_of(name: str) -> Any:
    """Of the field of this name, which has the kinds it lies under in it."""
    sections: list[Any] = [RunConfig]
    annotation: Any = None
    for part in name.split("."):
        if len(sections) > 1:
            sections = [section for section in sections if part in kinds_of(section)]
        else:
            annotation = sections[0].model_fields[part].annotation
            sections = members_of(annotation)
    return annotation


def is_number(annotation: Any) -> bool:
    return annotation in (int, float) or any(is_number(part) for part in get_args(annotation))


NUMBERS = sorted(name for name in FIELDS if not name.endswith(".kind") and is_number(annotation_of(name)))
LISTS = {name for name in NUMBERS if "tuple" in str(annotation_of(name))}


def under(section: str, *names: str) -> set[str]:
    return {f"{section}.{name}" for name in names}


def of_data(*names: str) -> set[str]:
    """Settings that every data set has, wherever it stands."""
    places = [f"prompts.{mixture}{kind}" for mixture in ("", "mixture.sources.") for kind in ("function", "jsonl")]
    return {name for place in places for name in under(place, *names)}


def of_sources(*names: str) -> set[str]:
    return under("prompts.mixture.sources.function", *names) | under("prompts.mixture.sources.jsonl", *names)


def of_sources_and_sets(*names: str) -> set[str]:
    return of_sources(*names) | under("eval.sets.sets", *names)


SCHEDULES = ("constant", "linear", "cosine")
ACCEPTED: dict[str, set[str]] = {
    # switches something off, or is an ordinary value
    "zero": {*under("buffer", "max_staleness", "policy.fixed_lag.lag_steps", "policy.drop.cut_staleness", "policy.token_mask.cut_staleness",
                      "zero_variance_tolerance"),
             *under("run", "error_budget", "seed"),
             *under("engine", "inline.logit_noise", "transformers.seed", "vllm.seed"), "weights.engine_restarts",
             "weights.transport.store.keep_bytes", *under("warm_up.cross_entropy", "betas", "ramp_steps", "seed"),
             *under("trainer", "betas", "max_restarts", "processes", "weight_decay", "sharding.prefetch_layers",
                    "schedule.linear.final_frac", "schedule.cosine.final_frac", *(f"schedule.{kind}.warm_up_steps" for kind in SCHEDULES)),
             *under("eval.sets.sets", "success_reward", "sampling.min_p"), *under("advantages.gae", "lam", "critic.warm_up_steps"),
             *under("sampling", "frequency_penalty", "min_new_tokens", "min_p", "presence_penalty"),
             *of_data("curriculum.pass_rate.hopeless_below", "curriculum.pass_rate.success_reward")},
    # a reward may be anything
    "minus": {"eval.sets.sets.success_reward", *of_data("curriculum.pass_rate.success_reward")},
    # it is a list
    "list": {"eval.sets.sets.pass_at"},
    # a large job, or a limit that is never reached: the machine and the clock say how much is too much
    "large": {*under("buffer", "max_bytes", "max_empty_fills", "max_staleness", "policy.drop.cut_staleness",
                       "policy.token_mask.cut_staleness", "zero_variance_tolerance"), "env.memory_bytes",
              *under("engine.inline", "context_tokens", "max_batch_requests"),
              *under("engine.transformers", "kv_cache_tokens", "max_batch_tokens", "max_running_requests"),
              *under("engine.vllm", "context_tokens", "kv_cache_bytes", "max_batch_tokens"), "sampling.temperature", "sampling.top_k",
              *under("eval.sets", "every_steps", "sets.success_reward", "sets.sampling.max_new_tokens", "sets.sampling.top_k"),
              *(f"advantages.{kind}.overlong.soft.weight" for kind in SHAPED),
              *under("advantages.gae.critic", "epochs", "max_grad_norm", "value_clip"),
              "weights.anchor_every_versions", "weights.engine_restarts", "weights.transport.store.keep_bytes",
              *under("run", "steps", "rollouts_every_steps", "probe.every_steps", "probe.max_mean_gap"),
              *under("trainer", "checkpoint_every_steps", "epochs", "max_grad_norm", "max_nonfinite_steps", "max_restarts",
                     "microbatch_tokens", "logits_chunk", "record_batches_every_steps",
                     "schedule.constant.warm_up_steps", "schedule.linear.total_steps", "schedule.cosine.total_steps"),
              *under("warm_up.cross_entropy", "batch_size", "check_every_steps", "max_steps", "ramp_steps"),
              *of_data("epochs", "max_prompt_tokens", "curriculum.pass_rate.min_rollouts", "curriculum.pass_rate.recheck_after_prompts",
                       "curriculum.pass_rate.success_reward"),
              *of_sources("weight"), *of_sources_and_sets("env.memory_bytes", "sampling.temperature")},
    # left out, something else decides
    "null": {"advantages.gae.critic.value_clip",
             *under("buffer", "max_bytes", "min_valid_rollouts", "window"), "env.memory_bytes", "sampling.top_k",
             *(f"engine.{kind}.context_tokens" for kind in ("inline", "transformers", "vllm")),
             *under("engine", "transformers.seed", "vllm.seed"), *under("eval.sets.sets.sampling", "top_p", "top_k", "min_p"),
             *under("trainer", "checkpoint_every_steps", "record_batches_every_steps"),
             "weights.anchor_every_versions", "weights.transport.store.keep_bytes", "eval.sets.sets.limit",
             *of_data("epochs", "max_prompt_tokens", "curriculum.pass_rate.recheck_after_prompts", "curriculum.pass_rate.hopeless_below",
                      "curriculum.pass_rate.solved_above"),
             *of_sources_and_sets("env.memory_bytes", "env.timeout_s", "env.workers", "sampling.max_new_tokens", "sampling.temperature")}}
"""What is taken all the same. Not a number, infinite, a text, true, an integer beyond 64 bits: nowhere."""


def outcome(name: str, value: Any) -> str:
    """`accepted`, or the dotted names the refusal gives."""
    place, kinds = FIELDS[name]
    tree = copy.deepcopy(TREE)
    for other, given in FLIPS[name].around:
        put(tree, other, given)
    for kind, section in kinds:
        if section not in dict(FLIPS[name].around):
            put(tree, section, SECTIONS[kind])
    put(tree, place, [value, *FLIPS[name].value[1:]] if name in LISTS and value is not None and not isinstance(value, list) else value)
    try:
        parse_config(tree, base=HERE)
    except ConfigError as error:
        return error.field
    return "accepted"


@pytest.mark.parametrize("label", SENSELESS)
def test_what_makes_no_sense_is_refused_and_the_rest_is_known(label: str) -> None:
    accepted = {name for name in NUMBERS if outcome(name, SENSELESS[label]) == "accepted"}
    known = [taken.get(label, set()) for taken in (ACCEPTED, *(flips.ACCEPTED for flips in (algorithm_flips, lora_flips, optimizer_flips)))]
    assert accepted == set().union(*known)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_refusal_names_the_field(name: str) -> None:
    place = FIELDS[name][0]
    for value in SENSELESS.values():
        refused = outcome(name, value)
        assert refused == "accepted" or any(field == place or field.startswith(f"{place}.") for field in refused.split(", ")), value


def test_there_are_numbers_to_try() -> None:
    assert len(NUMBERS) > 60
    assert {"trainer.betas", "warm_up.cross_entropy.betas"} <= LISTS
