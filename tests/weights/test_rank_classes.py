from __future__ import annotations

import json

import pytest

from asyncrl.errors import WeightSyncError
from asyncrl.weights.rank_classes import Placement, TensorPlan, rank_classes
from asyncrl.weights.routed_target import Layout


def held(shape, *blocks, dtype="BF16"):
    """Blocks as (sizes, offset, strides)."""
    return Placement(dtype, shape, tuple((sizes, Layout(offset, strides)) for sizes, offset, strides in blocks))


def rows(first, count, *, of, width=4):
    return held((of, width), ((count * width,), first * width, (1,)))


def columns(first, count, *, of, height=3):
    return held((height, of), ((height, count), first, (of, 1)))


WHOLE = held((4,), ((4,), 0, (1,)))


def test_a_shard_has_no_class_and_a_copy_has_that_of_its_holders():
    assert rank_classes([{"up": rows(0, 2, of=4), "down": columns(0, 3, of=6), "norm": WHOLE},
                         {"up": rows(2, 2, of=4), "down": columns(3, 3, of=6), "norm": WHOLE}]) == [
        {"up": "", "down": "", "norm": "0,1"}, {"up": "", "down": "", "norm": "0,1"}]


def test_of_four_ranks_two_may_share_a_head():
    classes = rank_classes([{"k": rows(0, 2, of=4)}, {"k": rows(0, 2, of=4)}, {"k": rows(2, 2, of=4)}, {"k": rows(2, 2, of=4)}])
    assert [rank["k"] for rank in classes] == ["0,1", "0,1", "2,3", "2,3"]


def test_a_rank_whose_share_is_padding_holds_nothing():
    assert rank_classes([{"embed": rows(0, 5, of=5)}, {}]) == [{"embed": ""}, {}]
    assert rank_classes([{"embed": rows(0, 5, of=5)}, {"embed": held((5, 4))}]) == [{"embed": ""}, {}]


def test_the_same_elements_are_known_again_however_they_are_described():
    one, other = held((2, 3), ((6,), 0, (1,))), held((2, 3), ((2, 3), 0, (3, 1)))
    assert rank_classes([{"x": one}, {"x": other}]) == [{"x": "0,1"}, {"x": "0,1"}]


@pytest.mark.parametrize(("placements", "reason"), [
    ([{"x": rows(0, 3, of=4)}, {"x": rows(2, 2, of=4)}], "x: ranks 0, 1 share some of its elements but not all"),
    ([{"x": columns(0, 4, of=6)}, {"x": columns(3, 3, of=6)}], "x: ranks 0, 1 share some of its elements but not all"),
    ([{"x": rows(0, 1, of=4)}, {"x": rows(2, 2, of=4)}], "x: all ranks together place 12 of its 16 elements"),
    ([{"x": rows(0, 2, of=4)}, {"x": held((4, 4), ((8,), 8, (1,)), dtype="F32")}], "x: ranks 0, 1 hold it as"),
])
def test_what_does_not_add_up_is_refused_by_name(placements, reason):
    with pytest.raises(WeightSyncError, match=reason):
        rank_classes(placements)


def test_what_one_rank_cannot_route_every_rank_loads_whole():
    plan = TensorPlan.of_ranks([{"up": rows(0, 2, of=4), "norm": WHOLE}, {"up": rows(2, 2, of=4)}], whole=[{}, {"norm": "cloned"}])
    assert plan.whole == ("norm",)
    assert plan.routed == {"up": ("BF16", (4, 4))}
    assert plan.classes == ({"up": ""}, {"up": ""})
    assert TensorPlan.from_plain(json.loads(json.dumps(plan.to_plain()))) == plan


def test_a_placement_travels_as_plain_values():
    placement = columns(3, 3, of=6)
    assert Placement.from_plain(json.loads(json.dumps(placement.to_plain()))) == placement
