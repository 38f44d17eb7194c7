"""What must not change a result: the order of sequences, the split into microbatches, what lies under the mask, padding."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.correction import Bounds, Corrected, Correction, CorrectionBatch, LossInputs, SecondMoment, correct, preset, weigh
from asyncrl.correction.aggregate import Denominators, aggregate, count
from asyncrl.correction.losses import decoupled_ppo
from asyncrl.correction.rules import geometric, kpop, opsm, vaco, veto

GARBAGE = (float("nan"), float("inf"), -float("inf"), 1e30, 5.0)
seeds = st.integers(0, 2**32 - 1)
CORRECTIONS = (
    *(preset(name) for name in ("none", "token_tis", "icepop")),
    Correction(truncate_low=0.7, truncate_high=(2.0, 1.5, 1.2), normalize="token"),
    Correction(level="turn", truncate_high=2.0), Correction(level="turn", reduce="mean", mask_low=0.5, mask_high=2.0),
    Correction(level="sequence", truncate_high=2.0, normalize="sequence"), Correction(level="sequence", reduce="mean", denominator="kept"),
    Correction(truncate_high=2.0, reject=(veto(0.1), kpop(0.5), SecondMoment(limit=0.5)), denominator="kept", normalize="token"),
    Correction(level="none", reject=(geometric(low=0.5, high=2.0), vaco(0.5), SecondMoment(form="tau"))),
    Correction(level="sequence", truncate_high=2.0, normalize="sequence",
               reject=(opsm(0.1), Bounds(statistic="k3", level="turn", high=0.5))))
corrections = st.sampled_from(CORRECTIONS)
local_corrections = st.sampled_from([correction for correction in CORRECTIONS if correction.is_token_local])


def draw(seed: int, *, garbage: float = 0.0) -> tuple[CorrectionBatch, torch.Tensor]:
    """A random float64 batch and current logprobs; `garbage` lies under the mask everywhere."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 7, size=rng.integers(1, 7))
    tokens = int(lengths.sum())
    mask = torch.from_numpy(rng.random(tokens) > 0.3)

    def values(scale: float) -> torch.Tensor:
        return torch.where(mask, torch.from_numpy(-rng.random(tokens) * scale), garbage)

    batch = CorrectionBatch(
        rollout_logprobs=values(3.0), proximal_logprobs=values(3.0), advantages=values(1.0) + 0.5, loss_mask=mask,
        turn_ids=torch.from_numpy(rng.integers(0, 3, tokens)), cu_seqlens=torch.from_numpy(np.concatenate([[0], lengths.cumsum()])),
        policy_versions=torch.where(mask, torch.from_numpy(rng.integers(0, 4, tokens)), -1),
        group_ids=torch.from_numpy(rng.integers(0, 3, len(lengths))), version=4)
    return batch, values(3.0)


def rows_of(batch: CorrectionBatch, sequences: list[int]) -> torch.Tensor:
    """Indices of the tokens of these sequences, in that order."""
    bounds = batch.cu_seqlens.tolist()
    return torch.tensor([t for n in sequences for t in range(bounds[n], bounds[n + 1])], dtype=torch.long)


def taken(batch: CorrectionBatch, sequences: list[int]) -> CorrectionBatch:
    """The batch that holds these sequences alone."""
    rows, chosen = rows_of(batch, sequences), torch.tensor(sequences, dtype=torch.long)
    fields = ("rollout_logprobs", "proximal_logprobs", "advantages", "loss_mask", "turn_ids", "policy_versions")
    offsets = torch.nn.functional.pad(batch.cu_seqlens.diff()[chosen].cumsum(0), (1, 0))
    return replace(batch, **{name: getattr(batch, name)[rows] for name in fields}, cu_seqlens=offsets, group_ids=batch.group_ids[chosen])


def loss_and_grad(batch: CorrectionBatch, logprobs: torch.Tensor, *, corrected: Corrected,
                  whole: Denominators | None = None) -> tuple[float, torch.Tensor]:
    """This share's part of the whole update's loss, and its gradient; without `whole` the share is all of it."""
    whole = whole or count(corrected.counted, cu_seqlens=batch.cu_seqlens)
    leaf = logprobs.clone().requires_grad_()
    result = decoupled_ppo(leaf, inputs=LossInputs.of(batch, corrected))
    loss = aggregate(result.losses, loss_mask=corrected.counted, cu_seqlens=batch.cu_seqlens, denominators=whole)
    loss.backward()
    return loss.item(), leaf.grad


@given(seeds, corrections, st.randoms())
def test_the_order_of_sequences_does_not_matter(seed: int, correction: Correction, random: object) -> None:
    batch, logprobs = draw(seed)
    order = list(range(len(batch.group_ids)))
    random.shuffle(order)
    moved, rows = taken(batch, order), rows_of(batch, order)
    plain, shuffled = correct(batch, correction), correct(moved, correction)
    torch.testing.assert_close(shuffled.weights, plain.weights[rows], rtol=1e-12, atol=0)
    assert torch.equal(shuffled.keep_mask, plain.keep_mask[rows])
    assert shuffled.metrics.result() == pytest.approx(plain.metrics.result(), rel=1e-9, abs=1e-12)
    loss, grad = loss_and_grad(batch, logprobs, corrected=plain)
    moved_loss, moved_grad = loss_and_grad(moved, logprobs[rows], corrected=shuffled)
    assert moved_loss == pytest.approx(loss, rel=1e-12, abs=1e-12)
    torch.testing.assert_close(moved_grad, grad[rows], rtol=1e-12, atol=1e-12)


def split(batch: CorrectionBatch, pieces: int) -> list[tuple[CorrectionBatch, torch.Tensor]]:
    """Shares of whole sequences, as ranks and micro-batches hold them, with the places of their tokens."""
    shares = [share.tolist() for share in np.array_split(np.arange(len(batch.group_ids)), pieces)]
    return [(taken(batch, share), rows_of(batch, share)) for share in shares]


@given(seeds, corrections, st.integers(1, 5))
def test_any_split_over_ranks_and_microbatches_gives_the_same_loss_and_gradient(seed: int, correction: Correction, pieces: int) -> None:
    batch, logprobs = draw(seed)
    whole = weigh(batch, correction)
    denominators = count(whole.counted, cu_seqlens=batch.cu_seqlens)
    loss, grad = loss_and_grad(batch, logprobs, corrected=whole)
    total, parts = 0.0, torch.zeros_like(grad)
    for piece, rows in split(batch, pieces):
        share = Corrected(weights=whole.weights[rows], keep_mask=whole.keep_mask[rows], counted=whole.counted[rows])
        part, parts[rows] = loss_and_grad(piece, logprobs[rows], corrected=share, whole=denominators)
        total += part
    assert total == pytest.approx(loss, rel=1e-12, abs=1e-12)
    torch.testing.assert_close(parts, grad, rtol=0, atol=1e-12)


@given(seeds, local_corrections, st.integers(1, 5))
def test_a_token_local_correction_may_be_made_on_any_slice(seed: int, correction: Correction, pieces: int) -> None:
    batch, _ = draw(seed)
    whole = weigh(batch, correction)
    for piece, rows in split(batch, pieces):
        corrected = weigh(piece, correction)
        assert torch.equal(corrected.weights, whole.weights[rows])
        assert torch.equal(corrected.keep_mask, whole.keep_mask[rows])


@given(seeds, corrections, st.sampled_from(GARBAGE))
def test_what_lies_under_the_mask_does_not_matter(seed: int, correction: Correction, garbage: float) -> None:
    clean, logprobs = draw(seed)
    dirty, dirty_logprobs = draw(seed, garbage=garbage)
    one, other = correct(clean, correction), correct(dirty, correction)
    assert torch.equal(one.weights, other.weights)
    assert torch.equal(one.keep_mask, other.keep_mask)
    assert one.metrics.result() == other.metrics.result()
    loss, grad = loss_and_grad(clean, logprobs, corrected=one)
    dirty_loss, dirty_grad = loss_and_grad(dirty, dirty_logprobs, corrected=other)
    assert loss == dirty_loss
    assert torch.equal(grad, dirty_grad)
    assert not grad[~clean.loss_mask].any()


@settings(derandomize=True)  # a random ratio may fall within rounding of a bound, where the two rightly differ
@given(seeds, corrections)
def test_float32_agrees_with_float64(seed: int, correction: Correction) -> None:
    batch, logprobs = draw(seed)
    narrow = replace(batch, **{f: getattr(batch, f).float() for f in ("rollout_logprobs", "proximal_logprobs", "advantages")})
    loss, grad = loss_and_grad(batch, logprobs, corrected=weigh(batch, correction))
    narrow_loss, narrow_grad = loss_and_grad(narrow, logprobs.float(), corrected=weigh(narrow, correction))
    assert narrow_loss == pytest.approx(loss, rel=2e-5, abs=2e-5)
    torch.testing.assert_close(narrow_grad.double(), grad, rtol=2e-5, atol=2e-5)
