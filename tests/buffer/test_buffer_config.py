import pytest
from pydantic import ValidationError

from asyncrl.buffer.config import BufferConfig, buffer_config, check_publish_interval, make_depth, make_policy
from asyncrl.buffer.depth import Depth
from asyncrl.buffer.policies import FixedLag, Lease, Soft
from asyncrl.errors import ConfigError

BASE = {"groups_per_step": 4, "group_size": 8, "max_staleness": 2}


@pytest.mark.parametrize(("change", "named"), [
    ({"max_staleness": -1}, "buffer.max_staleness"),
    ({"groups_per_step": 0}, "buffer.groups_per_step"),
    ({"group_size": 0}, "buffer.group_size"),
    ({"window": 0}, "buffer.window"),
    ({"stall_timeout_s": 0}, "buffer.stall_timeout_s"),
    ({"stall_timeout_s": float("inf")}, "buffer.stall_timeout_s"),
    ({"max_bytes": 0}, "buffer.max_bytes"),
    ({"max_empty_fills": 0}, "buffer.max_empty_fills"),
    ({"zero_variance_tolerance": -1e-9}, "buffer.zero_variance_tolerance"),
    ({"zero_variance": "maybe"}, "buffer.zero_variance"),
    ({"depth_groups": 0}, "buffer.depth_groups"),
    ({"max_stalenes": 1}, "buffer.max_stalenes"),
    ({"policy": {"kind": "lease", "lag_steps": 1}}, "buffer.policy"),
    ({"policy": {"kind": "fixed_lag"}}, "buffer.policy"),
])
def test_a_value_out_of_range_or_an_unknown_key_is_refused_by_name(change, named):
    with pytest.raises(ConfigError) as refused:
        buffer_config(**(BASE | change))
    assert refused.value.field.startswith(named)


@pytest.mark.parametrize(("change", "named"), [
    ({"window": 10}, "buffer.window, buffer.max_staleness, weights.publish_every_steps"),
    ({"max_staleness": 0, "window": 2}, "buffer.window, buffer.max_staleness, weights.publish_every_steps"),
    ({"window": 1, "policy": {"kind": "soft"}}, "buffer.window, buffer.policy.kind"),
    ({"depth_groups": "max", "policy": {"kind": "fixed_lag", "lag_steps": 1}}, "buffer.depth_groups, buffer.policy.kind"),
    ({"max_bytes": 1000, "policy": {"kind": "fixed_lag", "lag_steps": 1}}, "buffer.max_bytes, buffer.policy.kind"),
    ({"policy": {"kind": "fixed_lag", "lag_steps": 3}}, "buffer.policy.lag_steps, buffer.max_staleness"),
    ({"min_valid_rollouts": 9}, "buffer.min_valid_rollouts, buffer.group_size"),
])
def test_a_pair_that_cannot_work_is_refused_naming_both_fields(change, named):
    with pytest.raises(ConfigError) as refused:
        buffer_config(**(BASE | change))
    assert refused.value.field == named


def test_pydantic_keeps_the_text_of_a_refused_pair():
    with pytest.raises(ValidationError, match="min_valid_rollouts <= group_size"):
        BufferConfig(**BASE, min_valid_rollouts=9)


@pytest.mark.parametrize(("change", "every", "named"), [
    ({}, 4, "publish_every_steps"), ({"window": 6}, 2, "publish_every_steps"), ({}, 0, "weights.publish_every_steps"),
    ({"policy": {"kind": "soft"}}, 4, "publish_every_steps"), ({"policy": {"kind": "fixed_lag", "lag_steps": 1}}, 2, "publish_every_steps"),
    ({"depth_groups": 7}, 2, "buffer.depth_groups"), ({"depth_groups": 3}, 1, "buffer.depth_groups"),
    ({"depth_groups": 12}, 1, "buffer.depth_groups"),
])
def test_what_cannot_work_with_the_publish_interval_is_refused(change, every, named):
    config = buffer_config(**(BASE | change))
    with pytest.raises(ConfigError) as refused:
        check_publish_interval(config, every)
    assert named in refused.value.field


@pytest.mark.parametrize(("depth", "every", "expected"), [
    ("auto", 1, Depth(8, 4, 11, step_groups=1)), ("auto", 3, Depth(12, 12, 12, step_groups=1)), ("max", 1, Depth.fixed(11)),
    (6, 1, Depth.fixed(6))])
def test_depth_lies_between_one_publish_interval_and_the_capacity(depth, every, expected):
    config = buffer_config(**BASE, depth_groups=depth)
    assert make_depth(config, make_policy(config, publish_every_steps=every), publish_every_steps=every) == expected


def test_each_kind_makes_its_policy():
    assert make_policy(buffer_config(**BASE)) == Lease(groups_per_step=4, max_staleness=2)
    assert make_policy(buffer_config(**BASE, policy={"kind": "soft"})) == Soft(groups_per_step=4, max_staleness=2)
    lag = make_policy(buffer_config(**BASE, policy={"kind": "fixed_lag", "lag_steps": 2}), start_version=5)
    assert lag == FixedLag(groups_per_step=4, lag_steps=2, start_version=5)


@pytest.mark.parametrize(("size", "given", "least"), [(16, None, 2), (1, None, 1), (16, 5, 5)])
def test_a_group_needs_two_valid_rollouts_unless_told_otherwise(size, given, least):
    config = buffer_config(groups_per_step=4, group_size=size, max_staleness=1, min_valid_rollouts=given)
    assert config.least_valid_rollouts == least


def test_a_configuration_survives_being_written_and_read():
    for policy in ({"kind": "lease"}, {"kind": "soft"}, {"kind": "fixed_lag", "lag_steps": 1}):
        config = buffer_config(**BASE, policy=policy)
        assert buffer_config(**config.model_dump()) == config
