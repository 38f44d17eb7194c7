"""The dataclasses of `asyncrl.plan` from a case's inputs."""

from __future__ import annotations

from typing import Any

from asyncrl.plan.agentic import AgenticWorkload
from asyncrl.plan.hardware import Efficiencies, Hardware, Links, hardware_named
from asyncrl.plan.lengths import MeanMax
from asyncrl.plan.models import ModelShape
from asyncrl.plan.phases import Phases, Setup, phases
from asyncrl.plan.workload import Algorithm, Placement, Workload

Inputs = dict[str, Any]


def model_of(inputs: Inputs) -> ModelShape:
    """Rows that ask for parameters alone may leave the rest out."""
    row = inputs["model"]
    return ModelShape(name=row.get("name", "model"), total_params=row["n_total"], active_params=row.get("n_active", row["n_total"]),
                      layers=row.get("layers", 1), hidden=row.get("hidden", 1), kv_token_bytes=row.get("kv_token_bytes", 1.0),
                      rollout_param_bytes=row.get("rollout_param_bytes", 2.0), vocab=row.get("vocab", 1))


def links_of(inputs: Inputs) -> Links:
    row, plain = inputs.get("links", {}), Links()
    return Links(nic_bytes_s=row.get("nic", plain.nic_bytes_s), single_source_bytes_s=row.get("single_source", plain.single_source_bytes_s),
                 receiver_bytes_s=row.get("receiver", plain.receiver_bytes_s), pcie_bytes_s=row.get("pcie", plain.pcie_bytes_s),
                 ipc_bytes_s=row.get("ipc_bytes_s", plain.ipc_bytes_s), disk_bytes_s=row.get("disk", plain.disk_bytes_s),
                 group_setup_s=row.get("group_setup", plain.group_setup_s))


def hardware_of(inputs: Inputs) -> Hardware:
    gpu, eff, plain = inputs.get("gpu"), inputs.get("eff", {}), hardware_named("h100")
    efficiencies = Efficiencies(train_mfu=eff.get("mfu_train", 0.4), forward_mfu=eff.get("mfu_fwd", 0.5),
                                decode_bandwidth=eff.get("bw_util", 0.6), reserve=eff.get("reserve", 0.1),
                                activation_bytes=eff.get("act_bytes", 2e9), step_overhead_s=eff.get("step_overhead", 0.0))
    return Hardware(name="case", links=links_of(inputs), efficiencies=efficiencies,
                    peak_flop_s=gpu["peak"] if gpu else plain.peak_flop_s, memory_bytes=gpu["hbm"] if gpu else plain.memory_bytes,
                    memory_bytes_s=gpu["hbm_bw"] if gpu else plain.memory_bytes_s)


def setup_of(inputs: Inputs) -> Setup:
    work = inputs["work"]
    workload = Workload(prompts=work["prompts"], group_size=work["samples"], prompt_tokens=work["P"],
                        lengths=MeanMax(work["L"], work["L_max"]))
    algorithm = Algorithm(reference=work.get("ref", True), proximal=work.get("recompute_old", True), critic=work.get("ppo", False),
                          reward_model=work.get("reward_model", False), epochs=work.get("epochs", 1))
    placement = Placement(gpus=inputs["n"], tensor_parallel=inputs.get("tp", 1), gpu_memory_utilization=inputs.get("util"))
    return Setup(model=model_of(inputs), hardware=hardware_of(inputs), workload=workload, algorithm=algorithm, placement=placement)


def phases_of(inputs: Inputs) -> Phases:
    return phases(setup_of(inputs))


def agents_of(inputs: Inputs) -> AgenticWorkload:
    row = inputs["agentic"]
    return AgenticWorkload(tasks=row["tasks"], group_size=row["G"], turns=row["turns"], generated_tokens=row["gen_tokens"],
                           environment_tokens=row["env_tokens"], generation_s=row["gen_s"], environment_s=row["env_s"],
                           cores=row.get("cores", 1), final_context_tokens=row["final_ctx"], mean_context_tokens=row["mean_ctx"],
                           window_s=row["window"], gpus=row["n"])
