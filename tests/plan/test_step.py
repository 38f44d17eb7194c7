from dataclasses import replace

import pytest

from asyncrl.errors import ConfigError
from asyncrl.plan.advise import advise
from asyncrl.plan.models import model_named
from asyncrl.plan.report import as_json, as_text
from asyncrl.plan.shapes import SHAPES
from asyncrl.plan.step import plan_step
from tests.plan.scene import reference, spread


def test_the_reference_has_its_four_shapes() -> None:
    plan = plan_step(reference())
    assert tuple(plan.shapes) == SHAPES
    assert [plan.shapes[name].total_s for name in SHAPES] == pytest.approx([810, 1501, 764, 619], rel=5e-3)
    assert [plan.shapes[name].rollout_gpus for name in SHAPES] == [64, 46, 46, 42]
    assert sum(plan.waterfall.values()) == pytest.approx(1, abs=1e-9)


def test_a_spread_of_lengths_agrees_with_the_simulated_shapes() -> None:
    plan = plan_step(spread())
    assert plan.shapes["colocated"].total_s == pytest.approx(1121, rel=0.03)
    assert plan.shapes["one_step"].total_s == pytest.approx(1119, rel=0.03)
    assert plan.shapes["async"].total_s == pytest.approx(890, rel=0.03)
    assert plan.best == "async"
    assert sum(plan.waterfall.values()) == pytest.approx(1, abs=1e-9)


def test_splits_are_whole_nodes_and_leave_the_trainer_its_memory() -> None:
    plan = plan_step(replace(spread(gpus=128, tensor_parallel=2), model=model_named("qwen3-32b")))
    for name in SHAPES[1:]:
        assert plan.shapes[name].rollout_gpus % 8 == 0
        assert 16 * plan.setup.model.total_params / plan.shapes[name].train_gpus <= 70e9


def test_one_engine_alone_can_only_be_colocated() -> None:
    plan = plan_step(replace(spread(gpus=1, unit_gpus=1), model=model_named("smollm2-360m")))
    assert (list(plan.shapes), plan.best, plan.staleness) == (["colocated"], "colocated", None)


def test_what_does_not_fit_is_one_message() -> None:
    with pytest.raises(ConfigError, match=r"states of 128 GB a GPU, where 70 GB fit.*Take 2 GPUs"):
        plan_step(spread(gpus=1, unit_gpus=1))
    with pytest.raises(ConfigError, match="smaller units"):
        plan_step(spread(unit_gpus=48))
    with pytest.raises(ConfigError, match="transport"):
        plan_step(spread(transport="pigeon"))


def test_interruptions_and_a_skipped_forward_move_the_async_shape_alone() -> None:
    setup = spread()
    often = plan_step(replace(setup, algorithm=replace(setup.algorithm, syncs_per_step=8)))
    plain = plan_step(setup)
    assert often.shapes["async"].total_s > plain.shapes["async"].total_s
    assert often.shapes["colocated"] == plain.shapes["colocated"]
    assert often.reprefill_frac == pytest.approx(8 * plain.reprefill_frac, rel=0.5)
    trainer_bound = replace(setup, placement=replace(setup.placement, gpus=16))
    skipped = plan_step(replace(trainer_bound, algorithm=replace(setup.algorithm, async_proximal=False)))
    assert skipped.shapes["async"].total_s <= plan_step(trainer_bound).shapes["async"].total_s


def test_rollouts_with_turns_need_sandboxes() -> None:
    setup = spread()
    assert plan_step(setup).environments is None
    pool = plan_step(replace(setup, workload=replace(setup.workload, turns=10, environment_s=30.0, environment_tokens=200.0))).environments
    assert pool is not None
    assert pool.runs == 81_920
    assert pool.cpu_h == pytest.approx(81_920 * 30 / 3600)
    assert pool.sandboxes > pool.releasable


def test_the_json_has_the_keys_it_promises() -> None:
    tree = as_json(plan_step(reference()))
    assert all({"total_s", "mfu"} <= tree["shapes"][name].keys() for name in SHAPES)
    assert {"generation_s", "tail_s", "throughput_s", "forward_s", "train_s", "total_s", "mfu", "flop"} <= tree["colocated"].keys()
    assert sum(tree["waterfall"].values()) == pytest.approx(1)


def test_the_tables_show_every_shape() -> None:
    text = as_text(plan_step(spread()))
    assert all(name in text for name in SHAPES)
    assert max(map(len, text.splitlines())) <= 120
    assert "first-order model" in as_text(plan_step(reference()))


def test_advice_has_six_steps_and_widens_engines_until_they_fit() -> None:
    advice = advise(replace(spread(), model=model_named("llama-3-70b")))
    assert [step[:2] for step in advice.steps] == ["1.", "2.", "3.", "4.", "5.", "6."]
    assert advice.plan.setup.placement.tensor_parallel == 4
    assert advice.plan.setup.placement.transport == "multi_source"
    with pytest.raises(ConfigError, match="tensor_parallel"):
        advise(replace(spread(gpus=2, unit_gpus=1), model=model_named("deepseek-v3")))
