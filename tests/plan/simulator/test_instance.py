"""One engine against a loop over every token."""

import math

import numpy as np
import pytest

from asyncrl.plan.simulator.instance import Answer, Decoder, Instance

DECODER = Decoder(weight_bytes=16e9, kv_bytes_per_token=131072, bandwidth_bytes_per_s=2e12, kv_pool_tokens=400_000, step_overhead_s=1e-3)


def loop(decoder, *, prompt_tokens, lengths, version_at_s, stall_s):
    """Every step by itself: when each answer ends, its tokens by version, KV tokens read."""
    clock_s, version, read, running, ends, pending = 0.0, 0, 0, {n: 0 for n in range(len(lengths))}, {}, list(version_at_s)
    spans = {n: {} for n in running}
    while running:
        if pending and clock_s >= pending[0]:
            pending.pop(0)
            version, clock_s = version + 1, clock_s + stall_s
        context = sum(prompt_tokens + done for done in running.values())
        read += context
        clock_s += (decoder.weight_bytes + decoder.kv_bytes_per_token * context) / decoder.bandwidth_bytes_per_s + decoder.step_overhead_s
        for n in list(running):
            running[n] += 1
            spans[n][version] = spans[n].get(version, 0) + 1
            if running[n] == lengths[n]:
                ends[n] = clock_s
                del running[n]
    return ends, spans, read


@pytest.mark.parametrize("seed", range(4))
def test_ends_versions_and_bytes_are_those_of_a_loop_over_tokens(seed):
    rng = np.random.default_rng(seed)
    lengths = [int(n) for n in rng.integers(1, 400, size=30)]
    at_s, stall_s = [0.7, 1.9, 3.0], 0.25
    expected_ends, expected_spans, expected_read = loop(DECODER, prompt_tokens=50, lengths=lengths, version_at_s=at_s, stall_s=stall_s)
    instance = Instance("e0", DECODER, version=0, prompt_tokens=50)
    answers = [Answer(None, length) for length in lengths]
    for answer in answers:
        instance.join(answer, now_s=0.0, prefill_tokens=0)
    ends = {}
    while (when_s := instance.next_event_s()) is not None:
        if at_s and when_s >= at_s[0]:
            instance.reach(at_s.pop(0))
            instance.pause(stall_s)
            instance.update(instance.version + 1)
            continue
        for answer in instance.reach_event():
            ends[answers.index(answer)] = instance.clock_s
    assert ends == pytest.approx(expected_ends, rel=1e-9)
    assert [dict(answer.spans) for answer in answers] == [expected_spans[n] for n in range(len(answers))]
    assert instance.kv_tokens_read == expected_read


def test_kv_bytes_do_not_depend_on_who_runs_with_whom():
    lengths = [1, 7, 30, 200, 50, 3]
    instance = Instance("e0", DECODER, version=0, prompt_tokens=40)
    waiting = [Answer(None, length) for length in lengths]
    instance.join(waiting.pop(), now_s=0.0, prefill_tokens=0)
    while instance.next_event_s() is not None or waiting:
        if instance.next_event_s() is not None:
            instance.reach_event()
        if waiting:
            instance.join(waiting.pop(), now_s=instance.clock_s, prefill_tokens=0)
    assert instance.kv_tokens_read == sum(40 * length + length * (length - 1) // 2 for length in lengths)


def test_a_full_pool_pushes_out_who_joined_last_with_what_it_has():
    decoder = Decoder(weight_bytes=1.0, kv_bytes_per_token=1.0, bandwidth_bytes_per_s=1.0, kv_pool_tokens=60, growth_tokens=1)
    instance = Instance("e0", decoder, version=3, prompt_tokens=10)
    first, last = Answer(None, 40), Answer(None, 40)
    for answer in (first, last):
        instance.join(answer, now_s=0.0, prefill_tokens=0)
    assert instance.reach_event() == []
    assert instance.step == 20
    assert instance.evict_youngest() is last
    assert (last.done, last.spans, instance.context) == (20, [(3, 20)], 30)
    assert instance.reach_event() == [first]
    instance.join(last, now_s=instance.clock_s, prefill_tokens=30)
    instance.update(4)
    assert instance.reach_event() == [last]
    assert last.spans == [(3, 20), (4, 20)]
    assert last.done == 40


def test_a_moment_ends_the_step_under_way():
    instance = Instance("e0", DECODER, version=0, prompt_tokens=0)
    instance.join(Answer(None, 1000), now_s=0.0, prefill_tokens=0)
    step_s = 16e9 / 2e12 + 1e-3
    instance.reach(2.5 * step_s)
    assert instance.step == 3
    assert instance.clock_s == pytest.approx(3 * step_s, rel=1e-4)
    assert math.isclose(instance.decode_s, instance.clock_s)
