"""The machines of a plan: peaks of a device, what of them is reached, and the links between devices."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from asyncrl.plan.checks import at_least, fraction, named, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiencies:
    """What is reached of a peak. The defaults are the reference's; measured ones replace them."""

    train_mfu: float = 0.4
    """Share of peak FLOP/s in forward and backward of training."""
    forward_mfu: float = 0.5
    """Share of peak FLOP/s in prefill and in forwards that only score."""
    decode_bandwidth: float = 0.6
    """Share of memory bandwidth in decode."""
    reserve: float = 0.1
    """Share of memory an engine on its own device leaves free."""
    activation_bytes: float = 2e9
    """Beside weights and KV cache, where `gpu_memory_utilization` bounds them all."""
    step_overhead_s: float = 0.0
    """Of a decode step, before any byte is read: launches, scheduling."""
    train_floor_s: float = 0.0
    """Of a step's forwards and training, what more GPUs do not shorten."""

    def __post_init__(self) -> None:
        fraction(train_mfu=self.train_mfu, forward_mfu=self.forward_mfu, decode_bandwidth=self.decode_bandwidth)
        at_least(0, reserve=self.reserve, activation_bytes=self.activation_bytes, step_overhead_s=self.step_overhead_s,
                 train_floor_s=self.train_floor_s)
        fraction(**{"1 - reserve": 1 - self.reserve})


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Bytes a second between devices. Source of each rate: docs/planner.md."""

    nic_bytes_s: float = 50e9
    """Line rate of a device's network card."""
    single_source_bytes_s: float = 8.85e9
    """A broadcast from one rank; the mean of verl's measurements with NCCL, NIXL and Mooncake."""
    receiver_bytes_s: float = 60e9
    """Into each receiver, where all trainer ranks send: a fit to checkpoint-engine's measurements, flat over devices."""
    pcie_bytes_s: float = 25e9
    """Pinned host memory, one way."""
    ipc_bytes_s: float = 66e9
    """Between processes on one device."""
    disk_bytes_s: float = 10e9
    """A checkpoint's way to its disks, all ranks together."""
    group_setup_s: float = 1.0
    """Building the group of a transfer; a fit to the reference's one-step row."""

    def __post_init__(self) -> None:
        at_least(0, strictly=True, **{item.name: getattr(self, item.name) for item in fields(self) if item.name != "group_setup_s"})
        at_least(0, group_setup_s=self.group_setup_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device, and the node it sits in."""

    name: str
    peak_flop_s: float
    """Dense, in the dtype of training."""
    memory_bytes: float
    memory_bytes_s: float
    """Peak bandwidth of the device's own memory."""
    gpus_per_node: int = 8
    host_memory_bytes: float = 2e12
    """Of a node."""
    links: Links = field(default_factory=Links)
    efficiencies: Efficiencies = field(default_factory=Efficiencies)

    def __post_init__(self) -> None:
        at_least(0, strictly=True, peak_flop_s=self.peak_flop_s, memory_bytes=self.memory_bytes, memory_bytes_s=self.memory_bytes_s,
                 host_memory_bytes=self.host_memory_bytes)
        whole(1, gpus_per_node=self.gpus_per_node)


HARDWARE: dict[str, Hardware] = {machine.name: machine for machine in (
    Hardware(name="h100", peak_flop_s=989e12, memory_bytes=80e9, memory_bytes_s=3.35e12),
    Hardware(name="h200", peak_flop_s=989e12, memory_bytes=141e9, memory_bytes_s=4.8e12),
    Hardware(name="b200", peak_flop_s=2250e12, memory_bytes=180e9, memory_bytes_s=8e12),
    Hardware(name="a100", peak_flop_s=312e12, memory_bytes=80e9, memory_bytes_s=2.039e12),
    Hardware(name="mi300x", peak_flop_s=1307e12, memory_bytes=192e9, memory_bytes_s=5.3e12))}
"""By name: dense bf16 without sparsity, of the vendors' data sheets (SXM forms)."""


def hardware_named(name: str) -> Hardware:
    """A row of the table, in any case of letters. Raises ConfigError for a name it lacks."""
    named("hardware", name.lower(), HARDWARE, remedy="Build a Hardware(...) of your own machine from its data sheet, or pass "
          "--peak-tflops, --memory-gb and --bandwidth-tb-s with --hardware custom.")
    return HARDWARE[name.lower()]
