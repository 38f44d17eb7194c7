"""Sync, hand-off, memory, staleness, agents: each against its hand numbers."""

import math
from dataclasses import replace

import numpy as np
import pytest

from asyncrl.errors import ConfigError
from asyncrl.plan.agentic import AgenticWorkload, agentic_decode, agentic_prefill_s, agentic_train_flop, resident_frac
from asyncrl.plan.hardware import Links
from asyncrl.plan.lengths import Histogram
from asyncrl.plan.memory import checkpoint_s, logits_bytes, memory_fit, states_bytes
from asyncrl.plan.reference import agentic_rate, agentic_train_flop_12n
from asyncrl.plan.staleness import reprefill_flop, staleness, staleness_shares, update_interval_s
from asyncrl.plan.sync import bubble_frac, buckets, delta_s, hand_off, line_rate_s, multi_source_s, single_source_s
from asyncrl.plan.workload import Placement
from tests.plan.scene import reference

AGENTS = AgenticWorkload(tasks=500, group_size=8, turns=20, generated_tokens=400, environment_tokens=1600, generation_s=10,
                         environment_s=30, cores=1, final_context_tokens=40e3, mean_context_tokens=20e3, window_s=1800, gpus=32)


def test_the_ways_of_weight_sync() -> None:
    links = Links()
    assert single_source_s(8.85e9, links=links) == pytest.approx(2.0)
    assert single_source_s(470e9, links=links, layout="veomni_ep") == pytest.approx(256.7, rel=1e-3)
    assert multi_source_s(671e9, links=links) == pytest.approx(12.18, rel=1e-3)
    assert delta_s(470e9, ranks=64, changed_frac=0.00035, tensors=36_848) == pytest.approx(13.72, rel=1e-3)
    assert line_rate_s(671e9, links=links) == pytest.approx(13.42)
    assert buckets(671e9) == 1311
    assert bubble_frac(15, minibatches=4, minibatch_s=60) == pytest.approx(15 / 255)
    with pytest.raises(ConfigError, match="none, fsdp"):
        single_source_s(1e9, links=links, layout="zero4")


def test_a_hand_off_moves_states_out_and_back() -> None:
    moved = hand_off(32.8e9, gpus=8, hardware=reference().hardware, engine_bytes=65.6e9)
    assert (moved.bytes_per_gpu, moved.pinned_bytes) == (131.2e9, 524.8e9)
    assert (moved.optimizer_s, moved.total_s) == pytest.approx((3.936, 5.248 + 65.6 / 66 + 0.2), rel=1e-3)


def test_memory_is_summed_and_bounded() -> None:
    setup = reference()
    fit = memory_fit(setup.model, hardware=setup.hardware, workload=setup.workload, algorithm=setup.algorithm, placement=setup.placement,
                     train_gpus=16)
    assert fit.states_bytes == setup.model.total_params
    assert fit.reference_bytes == setup.model.total_params / 8
    assert fit.trains
    assert fit.changes_hands
    assert not replace(fit, states_bytes=71e9).trains
    assert not replace(fit, pinned_bytes=3e12).changes_hands
    assert states_bytes(70.6e9, gpus=8) == pytest.approx(141.2e9)
    assert logits_bytes(8192, vocab=128_256) == pytest.approx(4.2e9, rel=1e-3)
    assert checkpoint_s(671e9, disk_bytes_s=10e9) == pytest.approx(1073.6)


def test_staleness_counts_the_updates_of_a_life() -> None:
    assert [staleness(length * 0.01878, interval_s=150) for length in (2048, 8192, 32_768)] == [0, 1, 4]
    assert staleness(140, wait_s=20, interval_s=150) == 1


def test_shares_of_staleness_are_those_of_rollouts_begun_at_any_moment() -> None:
    lengths = Histogram.of([10, 25, 40, 90])
    shares = staleness_shares(lengths, step_s=1.0, interval_s=30.0)
    starts = np.arange(0, 30, 0.01)
    ages = [np.floor((starts + length) / 30).astype(int) for length in lengths.tokens]
    by_loop = np.bincount(np.concatenate(ages)) / (len(starts) * 4)
    assert shares.rollouts == pytest.approx(tuple(by_loop), abs=2e-3)
    assert sum(shares.tokens) == pytest.approx(1)
    assert shares.mean == pytest.approx(lengths.mean_tokens / 30)
    assert sum(age * share for age, share in enumerate(shares.tokens)) > shares.mean
    assert shares.max == 3
    with pytest.raises(ConfigError, match="interval_s"):
        staleness_shares(lengths, step_s=1.0, interval_s=math.nan)


def test_interruptions_cost_the_context_of_what_is_in_flight() -> None:
    assert reprefill_flop(8.03e9, in_flight=3864, context_tokens=4096, syncs=4) / 6.8e18 == pytest.approx(0.1495, rel=1e-3)
    assert update_interval_s(207.77, gpus=64, train_gpus=22, minibatches=4) == pytest.approx(151.1, rel=1e-3)


def test_environments_are_a_third_pool() -> None:
    assert (AGENTS.environment_runs, AGENTS.environment_frac) == (80_000, 0.8)
    assert (AGENTS.cpu_h, AGENTS.releasable_sandboxes, AGENTS.stateful_sandboxes) == pytest.approx((666.7, 1333.3, 1777.8), rel=1e-3)


def test_a_cache_that_keeps_contexts_makes_prefill_linear() -> None:
    setup = reference()
    linear, quadratic, between = (agentic_prefill_s(setup.model, hardware=setup.hardware, workload=AGENTS, resident_frac=share)
                                  for share in (1.0, 0.0, 0.5))
    assert (linear, quadratic) == pytest.approx((162.4, 1624), rel=1e-3)
    assert between == pytest.approx((linear + quadratic) / 2)
    assert resident_frac(setup.model, workload=AGENTS, pool_bytes_per_gpu=50e9) == pytest.approx(0.1526, rel=1e-3)
    with pytest.raises(ConfigError, match="resident_frac"):
        agentic_prefill_s(setup.model, hardware=setup.hardware, workload=AGENTS, resident_frac=1.5)


def test_decode_of_agents_is_bounded_by_what_fits() -> None:
    setup = reference()
    fitting = agentic_decode(setup.model, hardware=setup.hardware, workload=AGENTS, placement=Placement(gpus=32))
    assert (fitting.concurrency, fitting.tokens_s_per_gpu) == pytest.approx((21, 593.6), rel=1e-3)
    assert fitting.total_s == pytest.approx(32e6 / (32 * 593.6), rel=1e-3)
    assert agentic_rate(setup.model, hardware=setup.hardware, workload=AGENTS) > fitting.tokens_s_per_gpu  # contexts that do not fit
    assert agentic_train_flop(setup.model, workload=AGENTS) / agentic_train_flop_12n(setup.model, workload=AGENTS) == pytest.approx(10 / 12)
    with pytest.raises(ConfigError, match="tensor_parallel"):
        agentic_decode(setup.model, hardware=setup.hardware, workload=replace(AGENTS, mean_context_tokens=1e6, final_context_tokens=2e6),
                       placement=Placement(gpus=32))
