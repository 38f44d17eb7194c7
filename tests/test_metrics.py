import pytest

from asyncrl.metrics import Metrics


def test_a_mean_of_merged_parts_is_the_mean_of_the_whole():
    left, right = Metrics(), Metrics()
    left.mean("loss", 2.0, count=2)
    right.mean("loss", 0.0, count=8)
    left.merge(right)
    assert left.result() == {"loss": 0.2}


def test_a_mean_over_nothing_is_absent():
    bag = Metrics()
    bag.mean("loss", 0.0, count=0)
    assert bag.result() == {}


def test_each_reducer_does_what_it_says():
    bag = Metrics()
    for value in (3.0, -1.0, 2.0):
        bag.sum("s", value)
        bag.max("x", value)
        bag.min("n", value)
        bag.last("l", value)
        bag.mean("m", value, count=1)
    assert bag.result() == {"l": 2.0, "m": pytest.approx(4 / 3), "n": -1.0, "s": 4.0, "x": 3.0}


def test_a_name_has_one_reducer():
    bag = Metrics()
    bag.sum("tokens", 1)
    with pytest.raises(ValueError, match="'tokens' is reduced by 'sum', recorded now by 'max'"):
        bag.max("tokens", 1)


def test_the_wire_form_gives_the_bag_back():
    bag = Metrics()
    bag.mean("a/b/mean", 3.0, count=4)
    bag.last("c/d/last", 7.0)
    back = Metrics.from_wire(bag.to_wire())
    back.mean("a/b/mean", 1.0, count=4)
    assert back.result() == {"a/b/mean": 0.5, "c/d/last": 7.0}
