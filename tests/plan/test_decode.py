from dataclasses import replace

import numpy as np
import pytest

from asyncrl.errors import ConfigError
from asyncrl.plan.decode import IMBALANCE, decode, decode_step_s, kv_pool_bytes, longest_tokens
from asyncrl.plan.lengths import Histogram, Lognormal, MeanMax
from asyncrl.plan.phases import Setup
from tests.plan.scene import reference, spread


def planned(setup: Setup, **more: float):
    return decode(setup.model, hardware=setup.hardware, workload=setup.workload, placement=setup.placement, **more)


def token_loop(setup: Setup, lengths: list[int], slots: int) -> tuple[float, int]:
    """Seconds and steps of one engine that decodes token by token, a waiting answer in each slot that falls free; W and κ a step."""
    model, eff = setup.model, setup.hardware.efficiencies
    waiting, running, read, steps = list(lengths), [], 0.0, 0
    while waiting or running:
        while waiting and len(running) < slots:
            running.append([waiting.pop(), 0])
        read += model.replica_bytes + model.kv_token_bytes * sum(setup.workload.prompt_tokens + done for _, done in running)
        steps += 1
        running = [[length, done + 1] for length, done in running if done + 1 < length]
    return read / (setup.hardware.memory_bytes_s * eff.decode_bandwidth), steps


def test_kv_time_is_that_of_a_loop_over_tokens_for_any_batching() -> None:
    lengths = [int(length) for length in np.random.default_rng(0).integers(200, 3000, size=60)]
    setup = reference(Histogram.of(lengths), gpus=1)
    setup = replace(setup, workload=replace(setup.workload, prompts=60, group_size=1))
    plan = planned(setup)
    weights_step_s = decode_step_s(setup.model, hardware=setup.hardware, tensor_parallel=1, concurrency=0, context_tokens=0)
    for slots in (1, 7, 60):
        seconds, steps = token_loop(setup, lengths, slots)
        kv_s = plan.throughput_s - setup.workload.response_tokens / plan.concurrency * weights_step_s
        assert seconds - steps * weights_step_s == pytest.approx(kv_s, rel=1e-3)


def test_equal_answers_take_what_the_loop_takes() -> None:
    lengths = [400] * 40
    setup = reference(MeanMax(400, 400), gpus=1)
    setup = replace(setup, workload=replace(setup.workload, prompts=40, group_size=1))
    seconds, _ = token_loop(setup, lengths, 40)
    assert planned(setup).generation_s == pytest.approx(seconds, rel=2e-3)


def test_the_reference_is_reproduced() -> None:
    plan = planned(reference())
    assert (plan.concurrency, plan.context_tokens) == (92, 4596)
    assert (plan.step_s, plan.throughput_s, plan.tail_s) == pytest.approx((0.0356, 405.3, 196.4), rel=2e-3)
    assert planned(reference(gpus=128)).concurrency == 64  # the batch fills no more


def test_lengths_with_a_spread_fill_the_cache_sooner() -> None:
    plan = planned(spread())
    assert plan.concurrency == 58
    assert plan.throughput_s == pytest.approx(643, rel=0.01)
    assert plan.generation_s == pytest.approx(889, rel=0.01)
    weights_s = 32_768 * decode_step_s(spread().model, hardware=spread().hardware, tensor_parallel=1, concurrency=0, context_tokens=0)
    assert plan.generation_s > weights_s
    assert IMBALANCE == 1.25


def test_an_environment_leaves_slots_waiting() -> None:
    plain = spread()
    slow = replace(plain, workload=replace(plain.workload, turns=4, environment_s=60.0))
    assert planned(slow).throughput_s > planned(plain).throughput_s
    assert planned(slow).step_s < planned(plain).step_s  # fewer decode at once
    assert planned(replace(plain, workload=replace(plain.workload, turns=4))).throughput_s == planned(plain).throughput_s


def test_compute_bounds_a_step_when_bytes_do_not() -> None:
    setup = spread()
    slow = replace(setup, hardware=replace(setup.hardware, peak_flop_s=1e12))
    assert planned(slow).step_s == pytest.approx(2 * setup.model.active_params * 58 / 0.5e12)


def test_a_utilisation_bounds_weights_cache_and_activations() -> None:
    setup = reference(gpu_memory_utilization=0.5)
    assert kv_pool_bytes(setup.model, hardware=setup.hardware, placement=setup.placement) == 38e9 - setup.model.replica_bytes
    assert planned(setup).generation_s == pytest.approx(745, rel=0.01)


def test_the_longest_of_more_answers_is_longer() -> None:
    lengths = Lognormal(1000, 100_000, sigma=0.8)
    drawn = lengths.sample(np.random.default_rng(0), groups=2000, group_size=64, correlation=0.0)
    assert longest_tokens(lengths, rollouts=64) == pytest.approx(np.median(drawn.max(axis=1)), rel=0.1)
    assert longest_tokens(lengths, rollouts=8192) > longest_tokens(lengths, rollouts=64)
    assert longest_tokens(MeanMax(5, 9), rollouts=1) == 9


def test_an_engine_that_does_not_fit_is_told_how_it_would() -> None:
    setup = reference()
    small = replace(setup, hardware=replace(setup.hardware, memory_bytes=10e9))
    with pytest.raises(ConfigError, match=r"16\.1 GB of weights in 1 × 9\.0 GB.*tensor_parallel to 2"):
        planned(small)
    with pytest.raises(ConfigError, match="holds one sequence"):
        planned(replace(setup, hardware=replace(setup.hardware, memory_bytes=18e9)))
    with pytest.raises(ConfigError, match="Raise gpu_memory_utilization"):
        planned(reference(gpu_memory_utilization=0.01))
