"""Laws of a simulated run, under the real buffer's policies."""

import dataclasses

import numpy as np
import pytest

from asyncrl.buffer.config import buffer_config
from asyncrl.errors import ConfigError
from asyncrl.plan.lengths import Histogram, Lognormal
from asyncrl.plan.simulator import Decoder, Failures, Scenario, Simulation, Trainer, Updates, simulate

DECODER = Decoder(weight_bytes=16.06e9, kv_bytes_per_token=131072, bandwidth_bytes_per_s=2.01e12, kv_pool_tokens=427_000,
                  prefill_s_per_token=3.2e-5)
LEASE, SOFT = {"kind": "lease"}, {"kind": "soft"}


def scenario(staleness, policy, *, engines=6, train_s=2e-5, interruption="recompute", every=1, **changes):
    """6 engines; a batch of 16 groups of 16 answers of 1 000 tokens."""
    window = {"window": 1} if policy == LEASE else {}
    buffer = buffer_config(groups_per_step=16, group_size=16, max_staleness=staleness, policy=policy, depth_groups="max", **window)
    updates = Updates(stall_s=0.5, interruption=interruption, publish_every_steps=every)
    whole = {"engines": engines, "decoder": DECODER, "trainer": Trainer(s_per_token=train_s), "updates": updates, "buffer": buffer,
             "lengths": Lognormal(1000, 4000, 0.8), "prompt_tokens": 100, "steps": 14}
    return Scenario(**whole | changes)


@pytest.mark.parametrize("policy", [LEASE, SOFT])
def test_without_staleness_every_token_is_of_the_version_it_trains(policy):
    result = simulate(scenario(0, policy))
    assert set(result.staleness_tokens) == {0}
    assert (result.mean_staleness, result.max_staleness, result.versions_per_sequence) == (0, 0, 1)


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_the_mean_is_the_bound_while_admission_binds(staleness):
    # Little's law: (K + 1) P groups are held, P leave a step; a trainer that is faster than the engines keeps admission short
    result = simulate(scenario(staleness, SOFT, train_s=4e-5, steps=24, warm_up_steps=8))
    assert result.mean_staleness == pytest.approx(staleness, abs=0.05)


@pytest.mark.parametrize("interruption", ["recompute", "keep", "drain"])
@pytest.mark.parametrize(("staleness", "every"), [(1, 1), (2, 1), (3, 2)])
def test_lease_keeps_the_bound_whatever_happens(interruption, staleness, every):
    failing = Failures(mean_s_between=60.0, restart_s=5.0)
    result = simulate(scenario(staleness, LEASE, interruption=interruption, every=every, failures=failing))
    assert result.failures > 0
    assert max(result.staleness_tokens) <= staleness


@pytest.mark.parametrize("policy", [LEASE, SOFT, {"kind": "token_mask", "cut_staleness": 1}])
def test_what_is_trained_is_as_long_as_what_is_generated(policy):
    result = simulate(scenario(4, policy))
    assert (result.length_bias, result.dropped_tokens) == (1.0, 0)


def test_a_cut_trains_short_answers_and_tells():
    free, cut = simulate(scenario(4, SOFT)), simulate(scenario(4, {"kind": "drop", "cut_staleness": 1}))
    assert max(cut.staleness_tokens) <= 1 < free.max_staleness
    assert cut.length_bias < 0.9
    assert cut.trained_long_frac < 0.8 * cut.generated_long_frac
    assert cut.dropped_frac > 0.1
    assert cut.tokens_per_s < free.tokens_per_s


def test_a_mask_keeps_the_answers_and_takes_the_oldest_tokens():
    result = simulate(scenario(4, {"kind": "token_mask", "cut_staleness": 1}))
    assert max(result.staleness_tokens) <= 1 < result.max_staleness
    assert result.masked_tokens > 0


def test_every_kv_byte_is_read_once_for_each_later_token():
    simulation = Simulation(scenario(0, SOFT, interruption="keep"))
    simulation.run()
    lengths = Lognormal(1000, 4000, 0.8)
    drawn = lengths.sample(np.random.default_rng(0), groups=1024, group_size=16, correlation=0.5)[:16 * 14].ravel()
    expected = sum(100 * int(n) + int(n) * (int(n) - 1) // 2 for n in drawn)
    assert sum(instance.kv_tokens_read for instance in simulation.instances) == expected


def test_two_runs_are_equal_and_another_seed_is_not():
    first = simulate(scenario(2, SOFT))
    assert simulate(scenario(2, SOFT)) == first
    assert simulate(scenario(2, SOFT, seed=1)) != first


def test_engines_that_die_cost_time_and_no_answer():
    whole = simulate(scenario(2, SOFT))
    failing = simulate(scenario(2, SOFT, failures=Failures(mean_s_between=40.0, restart_s=20.0)))
    assert failing.failures > 0
    assert failing.tokens_per_s < whole.tokens_per_s
    assert failing.reprefill_tokens > whole.reprefill_tokens


def test_a_batch_of_equal_answers_takes_what_the_formula_says():
    # one group of 16 equal answers on one engine: L steps over W and a context that grows
    buffer = buffer_config(groups_per_step=1, group_size=16, max_staleness=0, depth_groups="max")
    decoder = dataclasses.replace(DECODER, prefill_s_per_token=0.0)
    result = simulate(scenario(0, SOFT, engines=1, buffer=buffer, decoder=decoder, lengths=Histogram((500,), (1.0,)), steps=3,
                               warm_up_steps=1))
    decode_s = (500 * 16.06e9 + 131072 * 16 * (500 * 100 + 500 * 499 / 2)) / 2.01e12
    assert result.step_s == pytest.approx(decode_s + 16 * 600 * 2e-5 + 0.5, rel=1e-6)


@pytest.mark.parametrize(("changes", "field"), [
    ({"engines": 0}, "engines"), ({"warm_up_steps": 14}, "warm_up_steps, steps"),
    ({"lengths": Lognormal(1000, 500_000, 0.8)}, "lengths.max_tokens, decoder.kv_pool_tokens")])
def test_what_cannot_run_is_refused(changes, field):
    with pytest.raises(ConfigError) as refused:
        scenario(1, SOFT, **changes)
    assert refused.value.field == field
