"""New weights on their way to the engines: whole from one rank, whole from all, or only what changed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from asyncrl.plan.checks import at_least, named, whole
from asyncrl.plan.hardware import Hardware, Links
from asyncrl.plan.memory import OPTIMIZER_BYTES, STATE_BYTES, states_bytes

LAYOUTS: dict[str, float] = {"none": math.inf, "fsdp": 12e9, "fsdp_offload": 6.3e9, "veomni_ep": 2.32e9}
"""Bytes a second at which a full tensor comes together, by how ranks hold it: fits to verl's table of delta weight sync."""
BUCKET_BYTES = 512e6
DELTA_FIXED_S, DELTA_SHARD_S_PER_GB, DELTA_PAYLOAD_S_PER_GB, DELTA_TENSOR_S = 0.5, 0.05, 1.4, 0.33e-3
"""Fits to four of verl's measurements: an interpolation between 7B and 235B, no prediction."""
_DELTA_PAYLOAD = 3.0
"""Bytes sent for each byte that changed: position and value."""
CHANGED_FRAC = {"dense": 0.02, "mixture": 0.00035}
"""Of parameters in bf16, a step: measured by verl, 1–3% and 0.02–0.05%."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncTimes:
    """The three ways, for the same weights."""

    single_source_s: float
    multi_source_s: float
    delta_s: float
    buckets: int
    peak_bytes: float
    """Of buffers on a rank: one bucket is sent while the next is filled."""


def single_source_s(wire_bytes: float, *, links: Links, layout: str = "none") -> float:
    """A broadcast by one rank: t0 + bytes/8.85 GB/s + bytes/R. Each tensor comes together first, at the rate R of its layout;
    then its bytes leave through one rank."""
    at_least(0, strictly=True, wire_bytes=wire_bytes)
    named("layout", layout, dict(LAYOUTS), remedy="Name how trainer ranks hold the weights; none, where each holds whole tensors.")
    return links.group_setup_s + wire_bytes / links.single_source_bytes_s + wire_bytes / LAYOUTS[layout]


def multi_source_s(wire_bytes: float, *, links: Links) -> float:
    """All ranks send their parts: t0 + bytes/60 GB/s. Every receiver takes in the whole stream, so the senders' links do not bound it,
    and it is flat in the number of GPUs (measured 11.3 s on 256, 10.2 s on 16)."""
    at_least(0, strictly=True, wire_bytes=wire_bytes)
    return links.group_setup_s + wire_bytes / links.receiver_bytes_s


def delta_s(full_bytes: float, *, ranks: int, changed_frac: float, tensors: int) -> float:
    """Only what changed: 0.5 + 0.05·GB of a rank's shard (searched) + 1.4·GB of payload (packed, sent, written) + 0.33 ms a tensor.
    The payload is 3·r·bytes: of each changed element its position and its value."""
    at_least(0, strictly=True, full_bytes=full_bytes)
    at_least(0, changed_frac=changed_frac, tensors=tensors)
    whole(1, ranks=ranks)
    payload_gb = _DELTA_PAYLOAD * changed_frac * full_bytes / 1e9
    return (DELTA_FIXED_S + DELTA_SHARD_S_PER_GB * full_bytes / ranks / 1e9 + DELTA_PAYLOAD_S_PER_GB * payload_gb
            + DELTA_TENSOR_S * tensors)


def line_rate_s(wire_bytes: float, *, links: Links) -> float:
    """One network card at its line rate: no broadcast from one rank is faster."""
    at_least(0, strictly=True, wire_bytes=wire_bytes)
    return wire_bytes / links.nic_bytes_s


def buckets(wire_bytes: float) -> int:
    """Transfers of at most 512 MB each."""
    return math.ceil(wire_bytes / BUCKET_BYTES)


def bubble_frac(sync_s: float, *, minibatches: int, minibatch_s: float) -> float:
    """Share of time that stands still: T/(k·T_mb + T), a sync after every k minibatches, with nothing beside it."""
    at_least(0, sync_s=sync_s)
    at_least(0, strictly=True, minibatch_s=minibatch_s)
    whole(1, minibatches=minibatches)
    return sync_s / (minibatches * minibatch_s + sync_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOff:
    """A device's change of hands in a step, colocated: trainer out, engine in, and back."""

    bytes_per_gpu: float
    """Over PCIe, both ways."""
    optimizer_s: float
    """Of it, the optimizer's way out and back."""
    total_s: float
    pinned_bytes: float
    """Host memory for the states of all ranks."""


_REMAP_S = 0.2
"""Unmapping and mapping physical pages, out and back."""


def hand_off(total_params: float, *, gpus: int, hardware: Hardware, engine_bytes: float) -> HandOff:
    """2·(12 + 2 + 2)·N/n over PCIe, then the engine's weights between processes, and remapping: bytes/PCIe + engine/IPC + 0.2 s.

    A rank's 16N/n bytes (12 optimizer, 2 parameters, 2 gradients) go to pinned host memory and come back.
    """
    links, moved = hardware.links, 2 * states_bytes(total_params, gpus=gpus)
    return HandOff(bytes_per_gpu=moved, optimizer_s=moved * OPTIMIZER_BYTES / STATE_BYTES / links.pcie_bytes_s,
                   total_s=moved / links.pcie_bytes_s + engine_bytes / links.ipc_bytes_s + _REMAP_S,
                   pinned_bytes=states_bytes(total_params, gpus=1))
