import pytest

from asyncrl.buffer.depth import Depth
from asyncrl.buffer.policies import FixedLag, Lease, Soft
from asyncrl.buffer.view import BufferView, Missing, SlotState, SlotView
from asyncrl.errors import StalenessError
from tests.buffer.buffer_fakes import batch_of

G, R, T = SlotState.GENERATING, SlotState.READY, SlotState.TAKEN


def view_of(*states: SlotState, version: int = 0, depth: int = 1000, first_overtaken: int = 0, ended: bool = False) -> BufferView:
    slots = tuple(SlotView(n, 0, state, version if state is T else None, 0 if n else first_overtaken) for n, state in enumerate(states))
    return BufferView(version=version, served_version=version, depth_groups=depth, slots=slots, ended=ended)


def after_takes(depth: Depth, *takes: tuple[bool, int]) -> int:
    for waited, left_over in takes:
        depth = depth.after_take(waited=waited, left_over_groups=left_over)
    return depth.groups


def test_lease_admits_what_capacity_and_depth_leave():
    lease = Lease(groups_per_step=4, max_staleness=2, window=2)
    assert lease.capacity_groups == 11
    assert lease.admit(view_of()) == 11
    assert lease.admit(view_of(T, R, G)) == 8
    assert lease.admit(view_of(T, R, G, depth=4)) == 1
    assert lease.admit(view_of(T, R, G, depth=2)) == 0


def test_zero_staleness_admits_one_batch():
    assert Lease(groups_per_step=4, max_staleness=0).admit(view_of()) == 4


def test_lease_takes_the_oldest_ready_groups_first():
    assert Lease(groups_per_step=2, max_staleness=2, window=1).select(view_of(T, R, R, R)) == (1, 2)


def test_too_few_ready_groups_name_those_that_generate():
    assert Lease(groups_per_step=2, max_staleness=2, window=3).select(view_of(G, R, T, G)) == Missing((0, 3))


@pytest.mark.parametrize(("window", "overtaken", "expected"), [
    (1, 0, Missing((0,))),     # nobody may pass group 0
    (2, 0, Missing((0,))),     # groups 1 and 2 would pass it: two, one too many
    (3, 0, (1, 2)),
    (3, 1, Missing((0,))),     # one has passed it before
    (4, 1, (1, 2)),
])
def test_a_generating_group_is_overtaken_by_less_than_the_window(window, overtaken, expected):
    lease = Lease(groups_per_step=2, max_staleness=3, window=window)
    assert lease.select(view_of(G, R, R, first_overtaken=overtaken)) == expected


def test_only_groups_that_block_are_named():
    lease = Lease(groups_per_step=2, max_staleness=3, window=2)
    assert lease.select(view_of(G, R, G, R, G)) == Missing((0,))
    assert lease.select(view_of(R, G, R, G)) == (0, 2)


@pytest.mark.parametrize("staleness", range(4))
@pytest.mark.parametrize("behind", range(5))
def test_lease_checks_every_token_against_the_bound(staleness, behind):
    lease, batch = Lease(groups_per_step=1, max_staleness=staleness), batch_of(9, 9, 9 - behind)
    if behind <= staleness:
        lease.check(batch, 9)
    else:
        with pytest.raises(StalenessError, match=rf"version {9 - behind} and .* 9: staleness {behind}, not in \[0, {staleness}\]"):
            lease.check(batch, 9)


def test_time_in_the_queue_counts():
    # Written by version 3 while the trainer was at 3; taken at 9.
    with pytest.raises(StalenessError, match="staleness 6"):
        Lease(groups_per_step=1, max_staleness=4).check(batch_of(9, 3), 9)


@pytest.mark.parametrize("policy", [Lease(groups_per_step=1, max_staleness=4), Soft(groups_per_step=1, max_staleness=4),
                                    FixedLag(groups_per_step=1, lag_steps=1)])
def test_a_token_from_the_future_is_an_error_under_every_policy(policy):
    with pytest.raises(StalenessError, match="staleness -1"):
        policy.check(batch_of(1, 2), 1)


def test_a_batch_of_another_version_is_an_error():
    with pytest.raises(StalenessError, match="a batch of version 5 was offered to a trainer at version 6"):
        Lease(groups_per_step=1, max_staleness=4).check(batch_of(5, 5), 6)


@pytest.mark.parametrize("version", [0, 50])
def test_soft_counts_from_the_version_it_resumes_at(version):
    # AReaL: (2 + version + 1) * 4 - accepted, where `version` batches were accepted before: 12 at version 0 and at 50.
    soft = Soft(groups_per_step=4, max_staleness=2)
    assert soft.admit(view_of(version=version)) == 12
    assert soft.admit(view_of(T, T, T, T, G, R, version=version)) == 6


def test_soft_lets_a_slow_group_be_overtaken_without_end():
    assert Soft(groups_per_step=2, max_staleness=3).select(view_of(G, R, R, first_overtaken=100)) == (1, 2)
    Soft(groups_per_step=1, max_staleness=2).check(batch_of(9, 0), 9)


def test_fixed_lag_fills_every_slot_before_a_batch_goes():
    lag = FixedLag(groups_per_step=2, lag_steps=1)
    assert lag.admit(view_of()) == 4
    assert lag.admit(view_of(depth=1)) == 4
    assert lag.select(view_of(R, R, R)) == Missing(())
    assert lag.select(view_of(R, R, R, G)) == Missing((3,))
    assert lag.select(view_of(R, R, R, R)) == (0, 1)
    assert lag.select(view_of(R, R, R, ended=True)) == (0, 1)


def test_fixed_lag_waits_until_the_engines_hold_what_the_last_batch_made():
    lag = FixedLag(groups_per_step=2, lag_steps=1)
    assert lag.select(view_of(T, T, R, R)) == Missing(())
    assert lag.select(view_of(T, T, R, R, ended=True)) == Missing(())


@pytest.mark.parametrize(("version", "token", "is_right"), [(10, 10, True), (11, 10, True), (12, 10, True), (13, 11, True), (13, 10, False),
                                                            (13, 12, False), (11, 11, False)])
def test_fixed_lag_demands_exactly_the_lag_once_the_run_is_that_old(version, token, is_right):
    lag = FixedLag(groups_per_step=1, lag_steps=2, start_version=10)
    if is_right:
        lag.check(batch_of(version, token), version)
    else:
        with pytest.raises(StalenessError):
            lag.check(batch_of(version, token), version)


def test_depth_moves_inside_its_limits():
    depth = Depth.auto(groups_per_step=16, least_groups=16, most_groups=35)
    assert depth.groups == 32
    assert depth.deeper().groups == 34
    assert depth.deeper().deeper().groups == 35
    assert after_takes(depth, *[(False, 100)] * 4) == 16
    assert Depth.fixed(7).deeper() == Depth.fixed(7)
    assert after_takes(Depth.fixed(7), *[(False, 5)] * 8) == 7


@pytest.mark.parametrize(("takes", "groups"), [
    ([(False, 6)] * 3, 32),                             # too few takes to tell
    ([(False, 6)] * 4, 29),                             # six were spare each time: half of them go
    ([(False, 6), (False, 3), (False, 9), (False, 6)], 30),
    ([(False, 6), (False, 1), (False, 9), (False, 6)], 32),   # less than a step was spare
    ([(False, 6), (True, 6), (False, 6), (False, 6)], 32),    # one waited
    ([(False, 1)] * 4 + [(False, 6)] * 4, 29),          # four quiet ones do not count against the next four
])
def test_depth_shrinks_by_half_of_what_every_take_left_over(takes, groups):
    assert after_takes(Depth.auto(groups_per_step=16, least_groups=16, most_groups=35), *takes) == groups
