"""The parity probe: right logprobs pass, every known way to be wrong is refused with its cause."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest

from asyncrl.clock import run_virtual
from asyncrl.errors import RunAborted
from asyncrl.rollout.engine import Interruption
from asyncrl.rollout.evaluate import roll_out_all
from asyncrl.rollout.fake_engine import FakeEngine, Faults, fake_manifest
from asyncrl.rollout.probe import Parity, judge, measure_parity
from asyncrl.types import Prompt, Rollout, Sampling, SequenceBuilder, Status
from tests.rollout.rollout_fakes import router_of, worker_of

LOGITS = np.asarray([2.0, 1.0, 0.0, -1.0])
LIMIT = 0.02


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum())


def written(tokens: list[int], logprobs: np.ndarray, *, version: int = 3, **fields) -> Rollout:
    """A rollout over a prompt of two tokens."""
    builder = SequenceBuilder([1, 2])
    builder.sampled(np.asarray(tokens, np.int32), logprobs=np.asarray(logprobs, np.float32), policy_version=version, kv_fresh=True, turn=0)
    return Rollout("p", -2, 0, (builder.build(),), Status.STOP, {"total": 1.0}, **fields)


def scoring(logprobs: np.ndarray):
    """A trainer for which every next-token distribution is exp(logprobs)."""
    async def score(sequences, *, temperature):
        return [np.where(sequence.policy_versions >= 0, logprobs[sequence.tokens % 4], 0.0).astype(np.float32) for sequence in sequences]
    return score


def measured(rollouts, logprobs: np.ndarray, *, version: int = 3) -> Parity:
    return asyncio.run(measure_parity(rollouts, score=scoring(logprobs), version=version))


def verdict(parity: Parity) -> str:
    """The text the probe refuses with."""
    with pytest.raises(RunAborted) as refused:
        judge(parity, max_mean_gap=LIMIT)
    return str(refused.value)


def test_logprobs_taken_after_the_temperature_pass():
    right = log_softmax(LOGITS / 0.6)
    assert right[0] == pytest.approx(-0.2081, abs=5e-5)
    parity = measured([written([0, 1, 0], right[[0, 1, 0]], sampling=Sampling(temperature=0.6))], right)
    assert (parity.num_tokens, parity.max_abs) == (3, pytest.approx(0, abs=1e-7))
    judge(parity, max_mean_gap=LIMIT)


@pytest.mark.parametrize("tokens", [[0], [0, 0, 1, 0, 2]])
def test_logprobs_taken_before_the_temperature_are_refused_with_that_cause(tokens):
    raw, right = log_softmax(LOGITS), log_softmax(LOGITS / 0.6)
    assert raw[0] == pytest.approx(-0.4402, abs=5e-5)
    text = verdict(measured([written(tokens, raw[tokens], sampling=Sampling(temperature=0.6))], right))
    assert "logprobs taken before the temperature (0.6)" in text
    assert "allowed: 0.02" in text


def test_logprobs_divided_by_the_temperature_are_refused():
    wrong, right = log_softmax(LOGITS) / 0.6, log_softmax(LOGITS / 0.6)
    assert wrong[0] == pytest.approx(-0.73365, abs=5e-6)
    assert "before the temperature" in verdict(measured([written([0], wrong[[0]], sampling=Sampling(temperature=0.6))], right))


def test_each_rollout_is_scored_at_its_own_temperature():
    asked = []

    async def score(sequences, *, temperature):
        asked.extend(temperature)
        return [np.where(sequence.policy_versions >= 0, log_softmax(LOGITS / each)[sequence.tokens % 4], 0.0).astype(np.float32)
                for sequence, each in zip(sequences, temperature, strict=True)]

    rollouts = [written([0, 1], log_softmax(LOGITS / each)[:2], sampling=Sampling(temperature=each)) for each in (1.3, 0.6)]
    parity = asyncio.run(measure_parity(rollouts, score=score, version=3))
    assert (asked, parity.temperatures, parity.max_abs) == ([1.3, 0.6], (0.6, 1.3), pytest.approx(0, abs=1e-7))


def test_a_constant_offset_is_refused_as_a_kept_set():
    right = log_softmax(LOGITS)
    parity = measured([written([0, 1, 2], right[:3] + 0.3)], right)
    assert (parity.mean_abs, parity.mean_signed) == (pytest.approx(0.3), pytest.approx(0.3))
    assert "renormalises over a kept set" in verdict(parity)


def test_renormalising_over_two_of_four_tokens_is_off_by_the_kept_mass():
    right = log_softmax(LOGITS)
    parity = measured([written([0, 1, 0], (right - np.log(np.exp(right[:2]).sum()))[[0, 1, 0]])], right)
    assert parity.mean_signed == pytest.approx(0.1269, abs=5e-5)
    assert "renormalises over a kept set" in verdict(parity)


def test_a_gap_on_both_sides_is_refused_as_other_weights():
    right = log_softmax(LOGITS)
    parity = measured([written([0, 1], right[:2] + np.asarray([0.3, -0.3]))], right)
    assert (parity.mean_abs, parity.mean_signed) == (pytest.approx(0.3), pytest.approx(0.0, abs=1e-6))
    assert "different weights" in verdict(parity)


def test_a_distribution_broader_than_the_trainers_is_named_so():
    right = log_softmax(LOGITS)
    assert "broader than the trainer's" in verdict(measured([written([0, 1], right[:2] - 0.3)], right))


def test_nan_is_over_every_limit():
    assert "NaN or infinite logits" in verdict(measured([written([0], [-0.4])], np.full(4, math.nan)))


def test_a_gap_at_the_limit_passes():
    judge(Parity(mean_abs=LIMIT, max_abs=1.0, mean_signed=LIMIT, num_tokens=1), max_mean_gap=LIMIT)


def test_the_mean_is_over_tokens_not_over_rollouts():
    right = log_softmax(LOGITS)
    rollouts = [written([0], right[[0]] + 0.9), written([0, 1], right[:2])]
    parity = measured(rollouts, right)
    assert (parity.num_tokens, parity.mean_abs, parity.max_abs) == (3, pytest.approx(0.3), pytest.approx(0.9))


def test_a_token_of_another_version_is_refused():
    right = log_softmax(LOGITS)
    with pytest.raises(RunAborted, match=r"tokens of versions \[2, 3\], the trainer is at 3"):
        measured([written([0], right[[0]]), written([0], right[[0]], version=2)], right)


def test_an_engine_that_wrote_nothing_is_refused_with_its_failures():
    failed = Rollout("p", -2, 0, (), Status.ENGINE_ERROR, error="400: no such model")
    with pytest.raises(RunAborted, match=r"wrote no token: \['400: no such model', 'prompt_too_long'\]"):
        measured([failed, Rollout("p", -2, 1, (), Status.PROMPT_TOO_LONG)], LOGITS)


async def _counting_score(sequences, *, temperature):
    """What a trainer computes whose policy is `counting_policy` at version 1."""
    return [np.where(s.policy_versions >= 0, -2.0 - np.maximum(np.arange(len(s)) - 2, 0) / 64, 0.0).astype(np.float32) for s in sequences]


@pytest.mark.parametrize(("faults", "cause"), [(Faults(), ""), (Faults(logprob_offset=0.3), "kept set"),
                                               (Faults(stale_prefix_cache=True), "at equal version")])
def test_the_probe_sees_what_an_engine_does_wrong_after_an_update(faults, cause):
    async def main():
        engine = FakeEngine()
        engine.faults = faults
        router = await router_of(engine)
        worker = worker_of(router, max_new_tokens=3)
        prompts = [Prompt(tokens=(3, 4), prompt_id="p")]
        await roll_out_all(worker, prompts, group_id=-2, stall_timeout_s=1e6)
        await router.update(fake_manifest(1, base=0), Interruption.KEEP)
        return await measure_parity(await roll_out_all(worker, prompts, group_id=-2, stall_timeout_s=1e6), score=_counting_score, version=1)
    parity = run_virtual(main())
    if cause:
        assert cause in verdict(parity)
    else:
        judge(parity, max_mean_gap=LIMIT)
        assert parity.num_tokens == 3
