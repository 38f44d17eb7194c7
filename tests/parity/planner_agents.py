"""Cases of rollouts with an environment."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from asyncrl.plan.agentic import agentic_decode, agentic_prefill_s, agentic_train_flop, decode_s, resident_frac
from asyncrl.plan.decode import kv_pool_bytes
from asyncrl.plan.reference import agentic_rate, agentic_train_flop_12n
from asyncrl.plan.workload import Placement
from tests.parity.planner_inputs import Inputs, agents_of, hardware_of, model_of

_UTILIZATION = 0.85


def answer(name: str, inputs: Inputs) -> Any:
    if "agentic" not in inputs:
        return None
    agents, word = agents_of(inputs), name.split("_", 1)[1]
    if "prefill" in word:
        return _prefill(word, inputs)
    if cores := re.match(r"cpu(\d*)", word):
        return replace(agents, cores=float(cores[1] or agents.cores)).cpu_h
    plain = {"runs": agents.environment_runs, "env": agents.environment_frac, "sb_state": agents.stateful_sandboxes,
             "sb": agents.releasable_sandboxes}
    for start, value in plain.items():
        if word.startswith(start):
            return value
    return _tokens(word, inputs)


def _tokens(word: str, inputs: Inputs) -> Any:
    agents, model = agents_of(inputs), model_of(inputs)
    if word == "train_10N":
        return agentic_train_flop(model, workload=agents)
    if word == "train":
        return agentic_train_flop_12n(model, workload=agents)
    if "rate" in inputs:
        return decode_s(agents, tokens_s_per_gpu=inputs["rate"])
    if word == "rate":
        return agentic_rate(model, hardware=hardware_of(inputs), workload=agents)
    placement = Placement(gpus=agents.gpus * inputs.get("tp", 1), tensor_parallel=inputs.get("tp", 1))
    fitting = agentic_decode(model, hardware=hardware_of(inputs), workload=agents, placement=placement)
    return fitting.total_s if word == "decode" else {"c_fit": fitting.concurrency, "tok_s_gpu": fitting.tokens_s_per_gpu}


def _prefill(word: str, inputs: Inputs) -> float:
    agents, model = agents_of(inputs), model_of(inputs)
    if "resident" in inputs or "hit" in word or "miss" in word:
        resident = inputs.get("resident", 1.0 if "hit" in word else 0.0)
    else:  # what the cache of an engine beside a trainer keeps
        placement = Placement(gpus=agents.gpus, gpu_memory_utilization=inputs.get("util", _UTILIZATION))
        pool = inputs.get("pool") or kv_pool_bytes(model, hardware=hardware_of(inputs), placement=placement)
        resident = resident_frac(model, workload=agents, pool_bytes_per_gpu=pool)
    return agentic_prefill_s(model, hardware=hardware_of(inputs), workload=agents, resident_frac=resident)
