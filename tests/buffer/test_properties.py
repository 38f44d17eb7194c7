import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.clock import run_virtual
from tests.buffer.simulator import Simulator


@st.composite
def runs(draw: st.DrawFn, *, lease: bool) -> dict[str, Any]:
    groups, staleness = draw(st.integers(1, 5)), draw(st.integers(0, 4))
    every = draw(st.integers(1, min(3, staleness + 1)))
    chosen: dict[str, Any] = {"groups_per_step": groups, "group_size": draw(st.integers(1, 3)), "max_staleness": staleness,
                              "publish_every_steps": every, "engines": draw(st.integers(1, 3)),
                              "zero_variance": draw(st.sampled_from(["drop", "keep"]))}
    if not lease:
        return chosen | {"policy": {"kind": "soft"}, "depth_groups": draw(st.sampled_from(["max", "auto"]))}
    room = (staleness + 1 - every) * groups
    window = draw(st.sampled_from([None, 1, 1 + room, 1 + min(room, draw(st.integers(0, room)))]))
    capacity = (staleness + 1) * groups - (window - 1 if window else 0)
    depths: list[Any] = ["max", "max", "auto"] + ([every * groups] if window and capacity >= every * groups else [])
    return chosen | {"window": window, "depth_groups": draw(st.sampled_from(depths))}


RUNS = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])


async def simulate(chosen: dict[str, Any], seed: int) -> Simulator:
    """Random actions, then as many rounds as it takes to train a few batches if nothing is stuck."""
    sim = Simulator(random.Random(seed), **chosen)
    await sim.advance()
    await sim.run(200)
    steps = await sim.drain(rounds := 4 * chosen["publish_every_steps"] + 4)
    assert steps >= chosen["publish_every_steps"] + 1, f"only {steps} steps in {rounds} rounds in which everybody did their part"
    await sim.close()
    return sim


@RUNS
@given(chosen=runs(lease=True), seed=st.integers(0, 2**32))
def test_lease_keeps_the_bound_whole_groups_and_a_closed_ledger_in_any_order_of_events(chosen, seed):
    sim = run_virtual(simulate(chosen, seed))
    assert set(sim.staleness) <= set(range(chosen["max_staleness"] + 1))


@pytest.mark.parametrize(("groups", "staleness", "window", "every"), [
    (1, 0, 1, 1), (4, 0, 1, 1), (1, 1, 1, 1), (2, 1, 1, 1), (2, 1, 2, 1), (3, 2, 2, 1), (4, 2, 5, 1), (4, 2, 3, 2), (3, 2, 1, 3),
    (4, 4, 2, 1), (5, 4, 6, 3), (10, 2, None, 1)])
@pytest.mark.parametrize("engines", [1, 3])
def test_the_worst_order_of_events_reaches_the_bound_and_does_not_pass_it(groups, staleness, window, every, engines):
    async def main():
        sim = Simulator(random.Random(0), groups_per_step=groups, group_size=2, max_staleness=staleness, window=window,
                        publish_every_steps=every, engines=engines, depth_groups="max")
        sim.calm = True
        await sim.advance()
        await sim.strain(12)
        await sim.close()
        return sim

    assert max(run_virtual(main()).staleness) == staleness


@settings(RUNS, max_examples=40)
@given(chosen=runs(lease=False), seed=st.integers(0, 2**32))
def test_soft_keeps_whole_groups_and_a_closed_ledger_and_never_trains_on_the_future(chosen, seed):
    sim = run_virtual(simulate(chosen, seed))
    assert min(sim.staleness, default=0) >= 0
