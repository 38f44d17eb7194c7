"""A configuration derived in six steps, each number with its reason."""

from __future__ import annotations

from dataclasses import dataclass, replace

from asyncrl.errors import ConfigError
from asyncrl.plan.lengths import cv2
from asyncrl.plan.phases import Setup
from asyncrl.plan.step import StepPlan, plan_step

_MIN_CONCURRENCY = 16
"""Below it a decode step reads weights for few tokens; a larger engine is tried."""
_TRANSPORTS = ("single_source", "multi_source", "delta")


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The plan that was chosen, and how it came about."""

    plan: StepPlan
    steps: tuple[str, ...]
    """Six, a paragraph each."""


def advise(setup: Setup) -> Advice:
    """Load, memory, shape, split, weight sync, asynchrony, in this order: each fixes what the next one needs.

    Tensor parallelism is the smallest whose KV cache holds enough sequences; the transport is the fastest; the shape the fastest that fits.
    Raises ConfigError where nothing fits.
    """
    fitted = _with_room(setup)
    plan = min((plan_step(replace(fitted, placement=replace(fitted.placement, transport=transport))) for transport in _TRANSPORTS),
               key=lambda one: one.sync_s)
    return Advice(plan=plan, steps=(_load(plan), _memory(plan), _shape(plan), _split(plan), _sync(plan), _asynchrony(plan)))


def _with_room(setup: Setup) -> Setup:
    """The smallest power of two from the given tensor parallelism on that holds weights and enough sequences; else the roomiest."""
    placement, found, failure = setup.placement, None, None
    size = placement.tensor_parallel
    while size <= placement.gpus and placement.gpus % size == 0:
        wider = replace(setup, placement=replace(placement, tensor_parallel=size))
        try:
            plan = plan_step(wider)
        except ConfigError as error:
            failure = failure or error
        else:
            found = wider
            if plan.phases.decode.pool_concurrency >= _MIN_CONCURRENCY:
                return wider
        size *= 2
    if found is None:
        raise failure or ConfigError("gpus", value=placement.gpus, allowed="one engine at least", remedy="Add GPUs.")
    return found


def _load(plan: StepPlan) -> str:
    step = plan.phases
    share = step.decode.generation_s / step.total_s
    return (f"1. Load. {step.flop.total:.3g} FLOP a step, and {plan.attention_ratio:.0%} more for attention; generation is {share:.0%} of "
            f"the colocated step, though {step.flop.decode / step.flop.total:.0%} of its FLOP: plan by time.")


def _memory(plan: StepPlan) -> str:
    memory, decode, placement = plan.memory, plan.phases.decode, plan.setup.placement
    weights_gb = memory.replica_bytes * placement.tensor_parallel / 1e9
    return (f"2. Memory. Engines of {placement.tensor_parallel} GPUs hold {weights_gb:.1f} GB of weights and "
            f"{memory.pool_bytes / 1e9:.1f} GB of KV cache, {decode.pool_concurrency} sequences of {decode.context_tokens:.0f} tokens; the "
            f"trainer's states take {memory.states_bytes / 1e9:.1f} of {memory.states_limit_bytes / 1e9:.0f} GB a GPU.")


def _shape(plan: StepPlan) -> str:
    others = ", ".join(f"{name} {shape.total_s:.4g} s" + (" (does not fit)" if shape.obstacle else "")
                       for name, shape in plan.shapes.items())
    return (f"3. Shape. {plan.best}: {others}. The tail is {plan.phases.decode.tail_frac:.0%} of generation "
            f"(CV² {cv2(plan.setup.workload.lengths):.2f}); asynchrony removes it.")


def _split(plan: StepPlan) -> str:
    chosen = plan.shapes[plan.best]
    if plan.best == "colocated":
        return (f"4. Split. None: all {chosen.train_gpus} GPUs generate and train in turn, and change hands in "
                f"{plan.hand_off.total_s:.2g} s.")
    return (f"4. Split. {chosen.rollout_gpus} GPUs generate and {chosen.train_gpus} train: the fastest of all splits in units of "
            f"{plan.setup.placement.unit_gpus}; the ratio of times is right only without a tail.")


def _sync(plan: StepPlan) -> str:
    sync = plan.sync
    return (f"5. Weight sync. {plan.setup.placement.transport}, {plan.sync_s:.3g} s (one source {sync.single_source_s:.3g} s, all sources "
            f"{sync.multi_source_s:.3g} s, delta {sync.delta_s:.3g} s), after every step: {plan.bubble_frac:.2%} of it "
            "if nothing goes on beside it.")


def _asynchrony(plan: StepPlan) -> str:
    if plan.staleness is None or plan.best != "async":
        return f"6. Asynchrony. {'Every batch is one step old.' if plan.best == 'one_step' else 'None: data is never stale.'}"
    return (f"6. Asynchrony. Generation alone makes data {plan.staleness.mean:.2f} steps old on average, {plan.staleness.max} at most; "
            f"max_staleness {plan.setup.algorithm.max_staleness} leaves the buffer the rest, with a correction. Interruptions compute "
            f"{plan.reprefill_frac:.1%} of the step's FLOP again.")
