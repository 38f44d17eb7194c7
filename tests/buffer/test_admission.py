import pytest

from asyncrl.buffer.admission import capacity_groups, default_window, least_depth_groups
from asyncrl.errors import ConfigError


@pytest.mark.parametrize(("groups", "staleness", "every", "window"), [
    (32, 2, 1, 10), (10, 2, 1, 4), (1, 2, 1, 1), (4, 1, 1, 2), (32, 0, 1, 1), (32, 2, 3, 1), (32, 2, 2, 10)])
def test_default_window_is_three_tenths_of_a_batch_as_far_as_there_is_room(groups, staleness, every, window):
    assert default_window(groups, max_staleness=staleness, publish_every_steps=every) == window


@pytest.mark.parametrize(("groups", "staleness", "window", "capacity"), [
    (32, 2, 10, 87), (4, 0, 1, 4), (4, 1, 1, 8), (4, 1, 5, 4), (1, 4, 1, 5)])
def test_capacity_is_staleness_plus_one_batches_less_the_window(groups, staleness, window, capacity):
    assert capacity_groups(groups, max_staleness=staleness, window=window, publish_every_steps=1) == capacity


@pytest.mark.parametrize(("staleness", "window", "every"), [(0, 2, 1), (1, 6, 1), (1, 2, 2), (0, 1, 2), (2, 1, 4)])
def test_a_window_without_room_is_refused_naming_the_three_fields(staleness, window, every):
    with pytest.raises(ConfigError, match=r"buffer\.window, buffer\.max_staleness, weights\.publish_every_steps"):
        capacity_groups(4, max_staleness=staleness, window=window, publish_every_steps=every)


def test_the_widest_window_leaves_exactly_what_one_publish_interval_needs():
    assert capacity_groups(4, max_staleness=3, window=9, publish_every_steps=2) == 8 == least_depth_groups(4, publish_every_steps=2)
