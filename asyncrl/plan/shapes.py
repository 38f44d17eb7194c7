"""The four shapes of a step, and the split between rollout and training that is fastest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from asyncrl.errors import ConfigError
from asyncrl.plan.checks import at_least, whole

SHAPES = ("colocated", "disaggregated", "one_step", "async")


@dataclass(frozen=True, slots=True, kw_only=True)
class Jobs:
    """What a step has to do, in seconds if each job had all the GPUs."""

    gpus: int
    throughput_s: float
    """Generation while engines are full."""
    tail_s: float
    """Of the longest answer; no GPU shortens it."""
    train_s: float
    """Forwards and training."""
    train_floor_s: float = 0.0
    """Of a step's training, what more GPUs do not shorten."""

    def __post_init__(self) -> None:
        whole(1, gpus=self.gpus)
        at_least(0, throughput_s=self.throughput_s, tail_s=self.tail_s, train_s=self.train_s, train_floor_s=self.train_floor_s)

    def rollout(self, rollout_gpus: int) -> float:
        """T_thr·n/n_r: full engines are as fast as there are many."""
        return self.throughput_s * self.gpus / self._pool("rollout_gpus", rollout_gpus)

    def training(self, rollout_gpus: int) -> float:
        """T_t·n/n_t on the GPUs left, and the floor."""
        return self.train_s * self.gpus / self._pool("training GPUs", self.gpus - rollout_gpus) + self.train_floor_s

    def _pool(self, name: str, gpus: int) -> int:
        if not 0 < gpus < self.gpus:
            raise ConfigError(name, value=gpus, allowed=f"1 to {self.gpus - 1} of the {self.gpus} GPUs",
                              remedy="Leave a GPU at least to either side, or plan the colocated shape.")
        return gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """GPUs of either side, and the step they give."""

    rollout_gpus: int
    train_gpus: int
    step_s: float


def colocated_s(jobs: Jobs, *, around_s: float = 0.0) -> float:
    """All jobs in turn on all GPUs: T_thr + T_tail + T_t, and what goes on around them (hand-over, sync, prefill)."""
    return jobs.throughput_s + jobs.tail_s + jobs.train_s + jobs.train_floor_s + around_s


def disaggregated_s(jobs: Jobs, *, rollout_gpus: int, sync_s: float = 0.0) -> float:
    """Two pools in turn: T_thr·n/n_r + T_tail + T_t·n/n_t (+ sync). Each waits while the other works."""
    return jobs.rollout(rollout_gpus) + jobs.tail_s + jobs.training(rollout_gpus) + sync_s


def one_step_s(jobs: Jobs, *, rollout_gpus: int, sync_s: float = 0.0) -> float:
    """Two pools at once, a batch apart: max(T_thr·n/n_r + T_tail, T_t·n/n_t) + sync. The barrier stays, and so does the tail."""
    return max(jobs.rollout(rollout_gpus) + jobs.tail_s, jobs.training(rollout_gpus)) + sync_s


def async_s(jobs: Jobs, *, rollout_gpus: int, stall_s: float = 0.0) -> float:
    """Two pools that never wait for a batch: max(T_thr·n/n_r + stall, T_t·n/n_t). Engines are full all the time, so there is no tail.

    `stall_s` is what interruptions take of generation in a step: syncs, and prefilling again what was in flight.
    """
    return max(jobs.rollout(rollout_gpus) + stall_s, jobs.training(rollout_gpus))


def balanced_async_s(jobs: Jobs) -> float:
    """The bound of `async_s` if GPUs could be split freely: max(T_thr/x, T_t/(1 − x)) is least where both are equal, T_thr + T_t."""
    return jobs.throughput_s + jobs.train_s


def async_gain(jobs: Jobs) -> float:
    """Colocated over balanced async, (T_thr + T_tail + T_t)/(T_thr + T_t) = 1/(1 − f·T_gen/(T_gen + T_t)): only the tail is won."""
    return (jobs.throughput_s + jobs.tail_s + jobs.train_s) / balanced_async_s(jobs)


def removal_cap(total_s: float, *, removed_s: float) -> float:
    """No law that only takes a job out of a step makes it faster than T/(T − job)."""
    at_least(0, strictly=True, total_s=total_s)
    at_least(0, removed_s=removed_s)
    at_least(0, strictly=True, **{"total_s - removed_s": total_s - removed_s})
    return total_s / (total_s - removed_s)


def best_split(gpus: int, *, unit_gpus: int, step_s: Callable[[int], float],
               train_fits: Callable[[int], bool] = lambda gpus: True) -> Split:
    """The fastest of all splits in units, by trying each: the rule n_r : n_t = T_gen : T_t is right only without a tail.

    Raises ConfigError when there are not two units, or training fits in none of the splits.
    """
    whole(1, gpus=gpus, unit_gpus=unit_gpus)
    ways = [rollout for rollout in range(unit_gpus, gpus, unit_gpus) if (gpus - rollout) % unit_gpus == 0]
    if not ways:
        raise ConfigError("gpus, unit_gpus", value=(gpus, unit_gpus), allowed="two units at least, and whole ones",
                          remedy="Add GPUs, split in smaller units, or colocate engine and trainer.")
    fitting = [rollout for rollout in ways if train_fits(gpus - rollout)]
    if not fitting:
        raise ConfigError("gpus", value=gpus, allowed="a split that leaves the trainer enough memory beside one engine",
                          remedy="Add GPUs, shard the trainer's states over more of them, or take a smaller model.")
    best = min(fitting, key=step_s)
    return Split(rollout_gpus=best, train_gpus=gpus - best, step_s=step_s(best))


def fitted_floor(relative_gpus: Sequence[float], *, throughput: Sequence[float]) -> float:
    """x of T(n) = (1 − x)/n + x, by least squares in T: what of a step more GPUs do not shorten.

    T is the first throughput over the n-th; T − 1/n = x·(1 − 1/n) is linear in x.
    """
    if len(relative_gpus) != len(throughput) or len(relative_gpus) < 2:
        raise ConfigError("throughput", value=len(throughput), allowed="as many throughputs as GPU counts, two at least",
                          remedy="Measure the run on another number of GPUs.")
    for count, rate in zip(relative_gpus, throughput, strict=True):
        at_least(0, strictly=True, relative_gpus=count, throughput=rate)
    relative = [count / relative_gpus[0] for count in relative_gpus]
    basis = [1.0 - 1.0 / count for count in relative]
    gaps = [throughput[0] / rate - 1.0 / count for count, rate in zip(relative, throughput, strict=True)]
    return sum(part * gap for part, gap in zip(basis, gaps, strict=True)) / sum(part**2 for part in basis)
