"""What an engine that records keeps to, as functions of a `Rig`."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np

from asyncrl.records import NO_EXPERT, KeptSets, Wanted, joined
from asyncrl.rollout.engine import Interruption
from asyncrl.types import Sampling, SequenceBuilder
from tests.rollout.engine_contract import Rig, Written

TRUNCATED = (Sampling(top_p=0.8), Sampling(top_k=3), Sampling(min_p=0.2, temperature=0.7), Sampling(top_p=0.7, top_k=5, min_p=0.05),
             Sampling(top_k=1), Sampling(), Sampling(top_k=1000))
"""The last two leave everything."""


def kept_of(written: Written) -> KeptSets:
    kept = joined([(chunk.records, len(chunk.tokens)) for chunk in written.chunks]).kept
    assert kept is not None
    kept.check(written.tokens)
    return kept


async def kept_sets_are_those_the_logprobs_are_over(rig: Rig) -> None:
    """`rig.check` renormalises a plain forward's logits over the recorded sets."""
    await rig.begin()
    asking = dataclasses.replace(rig, wanted=Wanted(kept_sets=True))
    samplings = [dataclasses.replace(sampling, max_new_tokens=10) for sampling in TRUNCATED]
    for written in await asking.write_all(samplings):
        rig.check(written)
        counts = kept_of(written).counts
        sampling = written.sampling
        if not sampling.truncates or sampling.top_k == 1000:
            assert not counts.any()
        elif sampling == dataclasses.replace(TRUNCATED[1], max_new_tokens=10):
            assert (counts == 3).all()
        else:
            assert ((counts > 0) & (counts < 48)).any()


async def kept_sets_hold_what_their_limits_leave(rig: Rig) -> None:
    """The mass of a top-p set reaches it, and without its least likely token would not; but for rounding at the edge."""
    await rig.begin()
    asking = dataclasses.replace(rig, wanted=Wanted(kept_sets=True))
    written = await asking.write(rig.prompts[1], Sampling(top_p=0.75, max_new_tokens=12), seed=4)
    kept = kept_of(written)
    whole = rig.distributions(written)
    for row, start, end in zip(whole, kept.offsets[:-1], kept.offsets[1:], strict=True):
        probs = np.sort(row[kept.ids[start:end]])
        assert probs.sum() >= 0.75 - 1e-4
        assert probs[1:].sum() <= 0.75 + 1e-4
        assert probs[0] >= np.delete(row, kept.ids[start:end]).max() - 1e-5, "the likeliest are kept"


async def nothing_is_recorded_that_was_not_wanted(rig: Rig) -> None:
    await rig.begin()
    written = await rig.write(rig.prompts[0], Sampling(top_k=3, max_new_tokens=5))
    assert all(chunk.records.arrays() == {} for chunk in written.chunks)


async def kept_sets_go_on_over_an_interruption(rig: Rig, kind: Interruption) -> None:
    await rig.begin()
    asking = dataclasses.replace(rig, wanted=Wanted(kept_sets=True))
    long, short = asking.start_long(Sampling(top_p=0.95, max_new_tokens=60))
    await short
    await rig.update(1, 0, kind)
    written = await asyncio.gather(*long)
    for one in written:
        rig.check(one)
        kept_of(one)
    assert any(len({version for _, version, _ in one.spans}) == 2 for one in written)


async def experts_are_those_of_a_forward_under_the_stamped_version(rig: Rig) -> None:
    """Of every token that was an input, the prompt's too; requests of several lengths run side by side."""
    await rig.begin()
    asking = dataclasses.replace(rig, wanted=Wanted(routed_experts=True))
    for written in await asking.write_all([Sampling(max_new_tokens=count) for count in (12, 3, 7, 1)] * 2):
        rig.check(written)
        found = experts_of(written)
        assert np.array_equal(np.sort(found, axis=-1), np.sort(rig.experts(written, 0), axis=-1))


async def experts_are_recorded_over_an_interruption(rig: Rig, kind: Interruption) -> None:
    """A token's record is that of the forward in which the token after it was sampled: under that one's version."""
    await rig.begin()
    asking = dataclasses.replace(rig, wanted=Wanted(kept_sets=True, routed_experts=True))
    long, short = asking.start_long(Sampling(top_k=6, max_new_tokens=40))
    await short
    await rig.update(1, 0, kind)
    crossed = 0
    for written in await asyncio.gather(*long):
        rig.check(written)
        found = experts_of(written)
        assert (found >= 0).all()
        if kind is Interruption.RECOMPUTE and [version for _, version, _ in written.spans] == [0, 1]:
            crossed += 1
            boundary = len(written.prompt) + written.spans[0][0] - 1
            old, new = (np.sort(rig.experts(written, version), axis=-1) for version in (0, 1))
            assert np.array_equal(np.sort(found, axis=-1), np.concatenate([old[:boundary], new[boundary:]]))
            assert not np.array_equal(old, new)
    assert crossed or kind is Interruption.KEEP


def experts_of(written: Written) -> np.ndarray:
    """[prompt + written − 1, L, k], as a session records them."""
    builder = SequenceBuilder(written.prompt)
    for chunk in written.chunks:
        builder.sampled(chunk.tokens, logprobs=chunk.logprobs, policy_version=chunk.policy_version, kv_fresh=chunk.kv_fresh, turn=0,
                        records=chunk.records)
    experts = builder.build().records.experts
    assert experts is not None
    assert (experts[-1] == NO_EXPERT).all(), "the last token is no input"
    return experts[:-1]


KEPT_RULES = (kept_sets_are_those_the_logprobs_are_over, kept_sets_hold_what_their_limits_leave, nothing_is_recorded_that_was_not_wanted)
