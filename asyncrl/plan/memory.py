"""Whether it fits: the trainer's states, the engine's weights and KV cache, the logits; and what a checkpoint takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from asyncrl.plan.checks import at_least, whole
from asyncrl.plan.decode import kv_pool_bytes
from asyncrl.plan.hardware import Hardware
from asyncrl.plan.models import ModelShape
from asyncrl.plan.workload import Algorithm, Placement, Workload

STATE_BYTES = 16.0
"""Of a parameter in mixed-precision training: 2 weight, 2 gradient, 12 master weight and Adam moments in float32."""
OPTIMIZER_BYTES = 12.0
"""Of them, the optimizer's: master weight and moments."""
_STATES_SHARE = 0.875
"""Of a device's memory that states may take: 70 GB of 80, the rest is activations."""
_HOST_SHARE = 0.5
"""Of host memory that pinned states may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """Bytes on one device, by what they are for."""

    states_bytes: float
    """16N/n, over the trainer's devices."""
    reference_bytes: float
    """2N/n of the initial model, where there is a KL."""
    replica_bytes: float
    """Of an engine's rank."""
    pool_bytes: float
    """KV cache of an engine, over its ranks."""
    logits_bytes: float
    """float32 [longest sequence, V] of a microbatch, where the loss is not computed in chunks."""
    states_limit_bytes: float
    pinned_bytes: float
    """16N in host memory, where devices change hands."""
    pinned_limit_bytes: float

    @property
    def trains(self) -> bool:
        """Whether states fit a device."""
        return self.states_bytes <= self.states_limit_bytes

    @property
    def changes_hands(self) -> bool:
        """Whether colocation is feasible: states fit the device, and all of them half of the hosts' memory."""
        return self.trains and self.pinned_bytes <= self.pinned_limit_bytes


def memory_fit(model: ModelShape, *, hardware: Hardware, workload: Workload, algorithm: Algorithm, placement: Placement,
               train_gpus: int) -> MemoryFit:
    """Of the trainer on so many devices, and of engines as placed. Raises ConfigError when an engine's weights do not fit."""
    nodes = math.ceil(train_gpus / hardware.gpus_per_node)
    sequence = workload.context_tokens + workload.lengths.max_tokens
    states = states_bytes(model.total_params, gpus=train_gpus) * (2 if algorithm.critic else 1)
    return MemoryFit(states_bytes=states, reference_bytes=2.0 * model.total_params / train_gpus if algorithm.reference else 0.0,
                     replica_bytes=model.replica_bytes / placement.tensor_parallel,
                     pool_bytes=kv_pool_bytes(model, hardware=hardware, placement=placement),
                     logits_bytes=logits_bytes(sequence, vocab=model.vocab),
                     states_limit_bytes=_STATES_SHARE * hardware.memory_bytes, pinned_bytes=states_bytes(model.total_params, gpus=1),
                     pinned_limit_bytes=_HOST_SHARE * nodes * hardware.host_memory_bytes)


def states_bytes(total_params: float, *, gpus: int) -> float:
    """16N/n: weight, gradient, master weight and two moments of every parameter, sharded evenly."""
    at_least(0, strictly=True, total_params=total_params)
    whole(1, gpus=gpus)
    return STATE_BYTES * total_params / gpus


def checkpoint_bytes(total_params: float) -> float:
    """16N: what resumes a run bit for bit, gradients' room included as the reference counts it."""
    at_least(0, strictly=True, total_params=total_params)
    return STATE_BYTES * total_params


def checkpoint_s(total_params: float, *, disk_bytes_s: float) -> float:
    """16N over the rate of the disks, all ranks together."""
    at_least(0, strictly=True, disk_bytes_s=disk_bytes_s)
    return checkpoint_bytes(total_params) / disk_bytes_s


def logits_bytes(tokens: float, *, vocab: int) -> float:
    """4·s·V: float32 logits of s tokens."""
    return 4.0 * tokens * vocab
