"""The jobs of a step in seconds on all GPUs, and where the time of them goes."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.plan.costs import StepFlop, step_flop
from asyncrl.plan.decode import Decode, decode
from asyncrl.plan.hardware import Hardware
from asyncrl.plan.models import ModelShape
from asyncrl.plan.shapes import Jobs
from asyncrl.plan.sync import hand_off, line_rate_s
from asyncrl.plan.workload import Algorithm, Placement, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Everything that is planned."""

    model: ModelShape
    hardware: Hardware
    workload: Workload
    algorithm: Algorithm
    placement: Placement

    @property
    def is_reference(self) -> bool:
        """Whether the reference's first-order model is asked for."""
        return self.workload.lengths.is_reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """The colocated step: each job on all GPUs, one after the other."""

    gpus: int
    decode: Decode
    flop: StepFlop
    prefill_s: float
    forward_s: float
    train_s: float
    train_floor_s: float
    switch_s: float
    """Memory changes hands, out and back."""
    sync_s: float
    """The engines get the new weights."""

    @property
    def total_s(self) -> float:
        """The step."""
        around_s = self.prefill_s + self.switch_s + self.sync_s
        return self.decode.generation_s + self.forward_s + self.train_s + self.train_floor_s + around_s

    @property
    def jobs(self) -> Jobs:
        """What the shapes divide."""
        return Jobs(gpus=self.gpus, throughput_s=self.decode.throughput_s, tail_s=self.decode.tail_s,
                    train_s=self.forward_s + self.train_s, train_floor_s=self.train_floor_s)


def phases(setup: Setup) -> Phases:
    """FLOP over peak and efficiency for forwards and training, bytes over bandwidth for decode (`decode`), and the hand-over.

    Either way 2·16N/n bytes go over PCIe. The reference then sends the bf16 weights at line rate; the corrected model gives them between
    the processes of a device and counts the remapping (`hand_off`).
    """
    hardware, gpus = setup.hardware, setup.placement.gpus
    flop = step_flop(setup.model, workload=setup.workload, algorithm=setup.algorithm)
    forward_rate = gpus * hardware.peak_flop_s * hardware.efficiencies.forward_mfu
    train_rate = gpus * hardware.peak_flop_s * hardware.efficiencies.train_mfu
    switch_s, sync_s = (_reference_hand_over if setup.is_reference else _hand_over)(setup)
    return Phases(gpus=gpus, flop=flop, prefill_s=flop.prefill / forward_rate, forward_s=flop.forward / forward_rate,
                  train_s=flop.train / train_rate, train_floor_s=hardware.efficiencies.train_floor_s, switch_s=switch_s, sync_s=sync_s,
                  decode=decode(setup.model, hardware=hardware, workload=setup.workload, placement=setup.placement))


def _reference_hand_over(setup: Setup) -> tuple[float, float]:
    params, links = setup.model.total_params, setup.hardware.links
    moved = hand_off(params, gpus=setup.placement.gpus, hardware=setup.hardware, engine_bytes=0.0)
    return moved.bytes_per_gpu / links.pcie_bytes_s, line_rate_s(2.0 * params, links=links)


def _hand_over(setup: Setup) -> tuple[float, float]:
    rank_bytes = setup.model.replica_bytes / setup.placement.tensor_parallel
    moved = hand_off(setup.model.total_params, gpus=setup.placement.gpus, hardware=setup.hardware, engine_bytes=rank_bytes)
    sync_s = rank_bytes / setup.hardware.links.ipc_bytes_s
    return moved.total_s - sync_s, sync_s


def mfu(flop: float, *, gpus: int, peak_flop_s: float, seconds: float) -> float:
    """F/(n·F_peak·T)."""
    return flop / (gpus * peak_flop_s * seconds)


WATERFALL = ("decode", "tail", "forward", "train", "switch_sync", "mfu")


def waterfall(step: Phases, *, peak_flop_s: float) -> dict[str, float]:
    """Lost GPU-time of the colocated step by cause, over its time, down to MFU; closes to 1 exactly.

    A job loses its time less what its FLOP take at peak; the tail, the hand-over and the floor of training compute nothing.
    What is left over all jobs is F/(n·F_peak·T).
    """
    peak, total_s, flop = step.gpus * peak_flop_s, step.total_s, step.flop
    lost = {"decode": step.decode.throughput_s - flop.decode / peak, "tail": step.decode.tail_s,
            "forward": step.prefill_s + step.forward_s - (flop.prefill + flop.forward) / peak,
            "train": step.train_s + step.train_floor_s - flop.train / peak, "switch_sync": step.switch_s + step.sync_s}
    return {**{cause: seconds / total_s for cause, seconds in lost.items()}, "mfu": flop.total / peak / total_s}
