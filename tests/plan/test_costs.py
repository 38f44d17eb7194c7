from dataclasses import replace

import pytest

from asyncrl.plan.costs import attention_ratio, step_flop
from asyncrl.plan.lengths import Histogram
from asyncrl.plan.workload import Algorithm
from tests.plan.scene import reference, spread


def test_flop_are_those_of_a_loop_over_rollouts_and_tokens() -> None:
    lengths = [3, 5, 9, 9]
    setup = reference(Histogram.of(lengths))
    work = replace(setup.workload, prompts=2, group_size=2, prompt_tokens=4, turns=2, environment_tokens=6)
    algorithm = Algorithm(reward_model=True, critic=True, epochs=2)
    total = 0.0
    for length in lengths:
        total += sum(2 for _ in range(length))  # decode
        total += 2 * 2 * 6  # the environment, prefilled
        tokens = 4 + 2 * 6 + length
        total += tokens * (3 * 2 + 2 * 6 + (2 + 6))  # reference, proximal, reward; two epochs; critic
    total += 2 * 2 * 4  # each prompt once
    assert step_flop(setup.model, workload=work, algorithm=algorithm).total == pytest.approx(total * setup.model.active_params)


def test_attention_is_that_of_a_loop_over_pairs() -> None:
    lengths = [30, 50, 90]
    setup = reference(Histogram.of(lengths))
    work = replace(setup.workload, prompt_tokens=10)
    model = setup.model
    pairs = sum(position for length in lengths for position in range(10 + length))
    tokens = sum(10 + length for length in lengths)
    by_loop = 4 * model.layers * model.attention_width * pairs / (2 * model.active_params * tokens)
    assert attention_ratio(model, workload=work) == pytest.approx(by_loop, rel=0.02)


def test_attention_of_the_reference_is_no_small_part() -> None:
    setup = reference()
    assert attention_ratio(setup.model, workload=setup.workload) == pytest.approx(0.14, abs=0.005)
    assert attention_ratio(setup.model, workload=spread().workload) == pytest.approx(0.23, abs=0.015)
