"""A whole plan: the four shapes of a step on given machines, and everything around them."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

from asyncrl.errors import ConfigError
from asyncrl.plan.costs import attention_ratio
from asyncrl.plan.decode import Decode, decode
from asyncrl.plan.memory import MemoryFit, checkpoint_bytes, checkpoint_s, memory_fit
from asyncrl.plan.phases import Phases, Setup, mfu, phases, waterfall
from asyncrl.plan.shapes import Jobs, async_s, best_split, colocated_s, disaggregated_s, one_step_s
from asyncrl.plan.staleness import StalenessShares, reprefill_flop, staleness_shares
from asyncrl.plan.sync import (
    BUCKET_BYTES,
    CHANGED_FRAC,
    HandOff,
    SyncTimes,
    bubble_frac,
    buckets,
    delta_s,
    hand_off,
    multi_source_s,
    single_source_s,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapePlan:
    """One way to lay out the step."""

    total_s: float
    mfu: float
    tokens_s: float
    """Trained on, prompts included."""
    gpu_h: float
    """Of a step: what it costs."""
    rollout_gpus: int
    train_gpus: int
    obstacle: str | None = None
    """Why it cannot be built, though its seconds are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environments:
    """The third pool of a workload with turns, over the step of the async shape."""

    runs: int
    cpu_h: float
    sandboxes: float
    """At once, held for a rollout's whole life."""
    releasable: float
    """At once, given back while the policy writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What one step takes."""

    setup: Setup
    phases: Phases
    """Of the colocated shape."""
    shapes: dict[str, ShapePlan]
    """By name, in the order of `SHAPES`; the colocated one alone, where GPUs cannot be split."""
    waterfall: dict[str, float]
    """Of the colocated shape."""
    attention_ratio: float
    sync: SyncTimes
    sync_s: float
    """By the transport of the placement."""
    bubble_frac: float
    """Of the one-step shape, which waits for its syncs."""
    hand_off: HandOff
    memory: MemoryFit
    """Of the async shape's trainer, or of the colocated one where there is no other."""
    async_decode: Decode | None
    staleness: StalenessShares | None
    """Of the async shape: from generation alone, without time in the buffer."""
    reprefill_frac: float
    """Of the step's FLOP: what interrupted sequences compute again, all syncs of a step together."""
    checkpoint_bytes: float
    checkpoint_s: float
    environments: Environments | None

    @property
    def best(self) -> str:
        """The fastest shape that can be built."""
        return min((name for name, shape in self.shapes.items() if shape.obstacle is None), key=lambda name: self.shapes[name].total_s)


def plan_step(setup: Setup) -> StepPlan:
    """The account of a step. Raises ConfigError where the model fits in no shape."""
    step = phases(setup)
    sync = _sync_times(setup)
    sync_s = _sync_s(setup, sync)
    shapes, async_decode = _shapes(setup, step, sync_s)
    _check_any(setup, shapes)
    asynchronous = shapes.get("async", shapes["colocated"])
    model, hardware = setup.model, setup.hardware
    interval_s = asynchronous.total_s / setup.algorithm.syncs_per_step
    return StepPlan(
        setup=setup, phases=step, shapes=shapes, sync=sync, sync_s=sync_s, async_decode=async_decode,
        waterfall=waterfall(step, peak_flop_s=hardware.peak_flop_s), attention_ratio=attention_ratio(model, workload=setup.workload),
        bubble_frac=bubble_frac(sync_s, minibatches=1, minibatch_s=max(shapes.get("one_step", shapes["colocated"]).total_s - sync_s, 1e-9)),
        hand_off=hand_off(model.total_params, gpus=setup.placement.gpus, hardware=hardware,
                          engine_bytes=model.replica_bytes / setup.placement.tensor_parallel),
        memory=_memory(setup, asynchronous.train_gpus),
        staleness=staleness_shares(setup.workload.lengths, step_s=async_decode.step_s, interval_s=interval_s,
                                   wait_s=setup.workload.turns * setup.workload.environment_s) if async_decode else None,
        reprefill_frac=_reprefill_flop(setup, async_decode) * setup.algorithm.syncs_per_step / step.flop.total if async_decode else 0.0,
        checkpoint_bytes=checkpoint_bytes(model.total_params),
        checkpoint_s=checkpoint_s(model.total_params, disk_bytes_s=hardware.links.disk_bytes_s),
        environments=_environments(setup, async_decode or step.decode, asynchronous.total_s))


def _shapes(setup: Setup, step: Phases, sync_s: float) -> tuple[dict[str, ShapePlan], Decode | None]:
    """Each shape at its fastest split; the reference has one split for both shapes with a barrier, and the corrected model one each."""
    placement, flop = setup.placement, step.flop.total
    around_s = step.prefill_s + step.switch_s + step.sync_s
    whole = _shape(setup, colocated_s(step.jobs, around_s=around_s), flop, (placement.gpus, placement.gpus))
    fit = _memory(setup, placement.gpus)
    shapes = {"colocated": replace(whole, obstacle=None if setup.is_reference else _obstacle(fit))}
    unit = math.lcm(placement.unit_gpus, placement.tensor_parallel)
    if placement.gpus < 2 * placement.tensor_parallel:
        return shapes, None
    divided = functools.cache(lambda rollout: _barrier_jobs(setup, step, rollout))
    asynchronous = functools.cache(lambda rollout: _async_s(setup, step, rollout, sync_s))
    paid_s = 0.0 if setup.is_reference else sync_s
    seconds = {"disaggregated": lambda rollout: disaggregated_s(divided(rollout), rollout_gpus=rollout, sync_s=paid_s),
               "one_step": lambda rollout: one_step_s(divided(rollout), rollout_gpus=rollout, sync_s=sync_s),
               "async": lambda rollout: asynchronous(rollout)[0]}
    least = 1 if setup.is_reference else _least_train_gpus(fit, placement.gpus)

    def fits(train_gpus: int) -> bool:
        return train_gpus >= least

    if not any(fits(placement.gpus - rollout) for rollout in range(unit, placement.gpus, unit)):
        return shapes, None
    splits = {name: best_split(placement.gpus, unit_gpus=unit, step_s=step_s, train_fits=fits).rollout_gpus
              for name, step_s in seconds.items()}
    if setup.is_reference:
        splits["disaggregated"] = splits["one_step"]
    shapes |= {name: _shape(setup, step_s(splits[name]), flop, (splits[name], placement.gpus - splits[name]))
               for name, step_s in seconds.items()}
    return shapes, asynchronous(splits["async"])[1]


def _barrier_jobs(setup: Setup, step: Phases, rollout_gpus: int) -> Jobs:
    """The reference scales the colocated jobs; else engines of the split generate the batch, with a tail of their own."""
    jobs = step.jobs
    if setup.is_reference:
        return jobs
    alone = _decode_on(setup, rollout_gpus)
    return replace(jobs, tail_s=alone.tail_s, throughput_s=(alone.throughput_s * rollout_gpus / jobs.gpus) + step.prefill_s)


def _least_train_gpus(fit: MemoryFit, gpus: int) -> int:
    """States are sharded evenly, so on fewer GPUs each holds more, in proportion."""
    return math.ceil(gpus * fit.states_bytes / fit.states_limit_bytes)


def _async_s(setup: Setup, step: Phases, rollout_gpus: int, sync_s: float) -> tuple[float, Decode]:
    """Engines hold what staleness lets them; each sync stops them for itself and for prefilling again what was in flight."""
    jobs, algorithm = step.jobs, setup.algorithm
    if setup.is_reference:
        return async_s(jobs, rollout_gpus=rollout_gpus), _decode_on(setup, rollout_gpus)
    in_flight = setup.workload.rollouts * max(1, algorithm.max_staleness)
    alone = _decode_on(setup, rollout_gpus, in_flight=in_flight)
    rate = rollout_gpus * setup.hardware.peak_flop_s * setup.hardware.efficiencies.forward_mfu
    stall_s = algorithm.syncs_per_step * (sync_s + _reprefill_flop(setup, alone) / rate)
    train_s = jobs.train_s
    if algorithm.proximal and not algorithm.async_proximal:
        train_s -= step.forward_s / algorithm.forwards
    jobs = replace(jobs, throughput_s=(alone.throughput_s * rollout_gpus / jobs.gpus) + step.prefill_s, train_s=train_s)
    return async_s(jobs, rollout_gpus=rollout_gpus, stall_s=stall_s), alone


def _decode_on(setup: Setup, gpus: int, *, in_flight: float | None = None) -> Decode:
    return decode(setup.model, hardware=setup.hardware, workload=setup.workload, placement=replace(setup.placement, gpus=gpus),
                  in_flight_rollouts=in_flight)


def _reprefill_flop(setup: Setup, alone: Decode) -> float:
    return reprefill_flop(setup.model.active_params, in_flight=alone.engines * alone.concurrency, context_tokens=alone.context_tokens)


def _shape(setup: Setup, seconds: float, flop: float, split: tuple[int, int]) -> ShapePlan:
    gpus = setup.placement.gpus
    return ShapePlan(total_s=seconds, mfu=mfu(flop, gpus=gpus, peak_flop_s=setup.hardware.peak_flop_s, seconds=seconds),
                     tokens_s=setup.workload.all_tokens / seconds, gpu_h=gpus * seconds / 3600, rollout_gpus=split[0], train_gpus=split[1])


def _sync_times(setup: Setup) -> SyncTimes:
    """Engines take bf16 or FP8 as they hold it; a delta is found on the trainer's ranks, taken as half of the GPUs."""
    model, links = setup.model, setup.hardware.links
    changed = CHANGED_FRAC["mixture" if model.is_mixture else "dense"]
    return SyncTimes(single_source_s=single_source_s(model.replica_bytes, links=links, layout=setup.placement.layout),
                     multi_source_s=multi_source_s(model.replica_bytes, links=links),
                     delta_s=delta_s(model.replica_bytes, ranks=max(1, setup.placement.gpus // 2), changed_frac=changed,
                                     tensors=model.tensors),
                     buckets=buckets(model.replica_bytes), peak_bytes=min(2 * BUCKET_BYTES, model.replica_bytes))


def _sync_s(setup: Setup, sync: SyncTimes) -> float:
    ways = {"single_source": sync.single_source_s, "multi_source": sync.multi_source_s, "delta": sync.delta_s}
    if setup.placement.transport not in ways:
        raise ConfigError("transport", value=setup.placement.transport, allowed=f"one of {', '.join(ways)}",
                          remedy="Name how new weights get to the engines.")
    return ways[setup.placement.transport]


def _memory(setup: Setup, train_gpus: int) -> MemoryFit:
    return memory_fit(setup.model, hardware=setup.hardware, workload=setup.workload, algorithm=setup.algorithm,
                      placement=setup.placement, train_gpus=train_gpus)


def _obstacle(fit: MemoryFit) -> str | None:
    if not fit.trains:
        return f"states of {fit.states_bytes / 1e9:.0f} GB a GPU, where {fit.states_limit_bytes / 1e9:.0f} GB fit"
    if not fit.changes_hands:
        return f"{fit.pinned_bytes / 1e9:.0f} GB of states to pin, where {fit.pinned_limit_bytes / 1e9:.0f} GB of host memory may be"
    return None


def _check_any(setup: Setup, shapes: dict[str, ShapePlan]) -> None:
    if all(shape.obstacle for shape in shapes.values()):
        fit = _memory(setup, setup.placement.gpus)
        least = _least_train_gpus(fit, setup.placement.gpus)
        raise ConfigError("model, gpus", value=(setup.model.name, setup.placement.gpus),
                          allowed=f"a model whose training fits: {shapes['colocated'].obstacle}",
                          remedy=f"Take {least} GPUs or more, GPUs with more memory, or a smaller model.")


def _environments(setup: Setup, alone: Decode, step_s: float) -> Environments | None:
    """Little's law: as many are at work as start in a second, times the seconds of each."""
    work = setup.workload
    if not work.environment_s:
        return None
    runs = work.rollouts * work.turns
    life_s = work.lengths.mean_tokens * alone.step_s + work.turns * work.environment_s
    return Environments(runs=runs, cpu_h=runs * work.environment_s * work.environment_cores / 3600,
                        sandboxes=work.rollouts * life_s / step_s, releasable=runs * work.environment_s / step_s)
