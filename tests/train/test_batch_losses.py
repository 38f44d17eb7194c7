"""Losses that look at the whole batch before its first update: M2PO's clip, GEPO's expectation of a group."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncrl.train.batch import PackedBatch, pack
from tests.train.plain_logprobs import assert_close, gradients_of, plain_model, plain_scores
from tests.train.train_data import first_gradient, inline_rank, random_batch, step_on


def near_batch(folder: Path, seed: int) -> PackedBatch:
    """Rollouts of a policy near the one that is trained, on both sides of it."""
    packed = pack(random_batch(seed, temperature=0.8))
    logprobs, _ = plain_scores(plain_model(folder), packed)
    moved = np.random.default_rng(seed).normal(0.0, 0.4, len(packed.tokens))
    packed.rollout_logprobs[:] = np.where(packed.loss_mask, np.minimum(logprobs.detach().numpy() + moved, -1e-3), 0.0)
    return packed


def advantages_of(packed: PackedBatch) -> Tensor:
    """r − mean of the group."""
    means = {group: packed.rewards[packed.group_ids == group].mean() for group in packed.group_ids}
    centred = np.array([reward - means[group] for reward, group in zip(packed.rewards, packed.group_ids, strict=True)])
    return torch.from_numpy(centred[packed.rollout_ids[packed.sequence_ids]]).double()


def m2po(logprobs: Tensor, packed: PackedBatch, *, limit: float, margins: tuple[float, float] = (0.0, 0.0)) -> tuple[Tensor, float]:
    """Mean over tokens of PPO clipped to e^±τ, and τ: found by bisection of its definition."""
    mask, advantages = torch.from_numpy(packed.loss_mask), advantages_of(packed)
    ratio = logprobs - torch.from_numpy(packed.rollout_logprobs).double()
    harmful = ratio.detach()[mask & (ratio.detach() * advantages > 0)]
    low, high = 0.0, 50.0
    for _ in range(100):
        tau = (low + high) / 2
        low, high = (tau, high) if float(harmful.abs().clamp(max=tau).square().mean()) < limit else (low, tau)
    bounds = min(1 - margins[0], float(np.exp(-tau))), max(1 + margins[1], float(np.exp(tau)))
    losses = -torch.minimum(advantages * ratio.exp(), advantages * ratio.exp().clamp(*bounds))
    return losses[mask].mean(), tau


@pytest.mark.parametrize("margins", [(0.0, 0.0), (0.3, 0.5)])
def test_m2po_clips_where_the_second_moment_of_the_batch_says(margins: tuple[float, float], tiny: Path, tmp_path: Path) -> None:
    packed, lm = near_batch(tiny, 0), plain_model(tiny)
    loss = {"kind": "m2po", "limit": 0.04, "min_clip_low": margins[0], "min_clip_high": margins[1]}
    expected, tau = m2po(plain_scores(lm, packed)[0], packed, limit=0.04, margins=margins)
    assert 0.1 < tau < 0.5
    for tokens in (4096, 15):
        rank = inline_rank(tiny, tmp_path, loss=loss, correction="none", advantages="dr_grpo", microbatch_tokens=tokens)
        assert_close(first_gradient(rank, packed), gradients_of(lm, m2po(plain_scores(lm, packed)[0], packed, limit=0.04,
                                                                          margins=margins)[0]))
    metrics = step_on(inline_rank(tiny, tmp_path, loss=loss, correction="none", advantages="dr_grpo"), packed).metrics.result()
    assert metrics["train/loss/mean"] == pytest.approx(float(expected.detach()), abs=1e-6)
    assert metrics["train/m2po_log_clip/last"] == pytest.approx(tau, rel=1e-5)


def test_a_limit_that_nothing_reaches_does_not_clip_and_is_not_told(tiny: Path, tmp_path: Path) -> None:
    packed = near_batch(tiny, 1)
    m2po_step, unclipped = (step_on(inline_rank(tiny, tmp_path, loss=loss, correction="none"), packed).metrics.result()
                            for loss in ({"kind": "m2po", "limit": 9.0}, "importance_sampling"))
    assert "train/m2po_log_clip/last" not in m2po_step
    assert m2po_step["train/loss/mean"] == unclipped["train/loss/mean"]


def gepo(logprobs: Tensor, packed: PackedBatch, keep: Tensor) -> Tensor:
    """[N] PPO's clip on exp(mean logprob) / (Σ q² / Σ q), written out."""
    advantages, rollout = advantages_of(packed), torch.from_numpy(packed.rollout_logprobs).double()
    rows = [keep[start:end].nonzero()[:, 0] + start for start, end in itertools.pairwise(packed.cu_seqlens.tolist())]
    q = [rollout[row].mean().exp() for row in rows]
    groups = packed.group_ids[packed.rollout_ids]
    losses = []
    for row, group in zip(rows, groups, strict=True):
        members = torch.stack([q[n] for n in np.flatnonzero(groups == group) if len(rows[n])])
        ratio = logprobs[row].mean().exp() / (members.square().sum() / members.sum())
        gain = advantages[row[:1]]
        losses.append(-torch.minimum(gain * ratio, gain * ratio.clamp(0.8, 1.2)).sum())
    return torch.stack(losses)


def test_gepo_compares_with_what_the_group_was_expected_to_have(tiny: Path, tmp_path: Path) -> None:
    packed, lm = near_batch(tiny, 2), plain_model(tiny)
    mask = torch.from_numpy(packed.loss_mask)
    for tokens in (4096, 15):
        rank = inline_rank(tiny, tmp_path, loss="gepo", correction="none", advantages="dr_grpo", microbatch_tokens=tokens)
        assert_close(first_gradient(rank, packed), gradients_of(lm, gepo(plain_scores(lm, packed)[0], packed, mask).mean()))


def test_gepo_expects_by_the_tokens_that_the_correction_keeps(tiny: Path, tmp_path: Path) -> None:
    packed, lm = near_batch(tiny, 3), plain_model(tiny)
    logprobs, _ = plain_scores(lm, packed)
    ratio = (logprobs.detach() - torch.from_numpy(packed.rollout_logprobs).double()).exp()
    keep = torch.from_numpy(packed.loss_mask) & (ratio <= 1.3)
    assert 0 < int(keep.sum()) < packed.num_loss_tokens
    assert all(keep[start:end].any() for start, end in itertools.pairwise(packed.cu_seqlens.tolist()))
    rank = inline_rank(tiny, tmp_path, loss="gepo", correction={"kind": "custom", "level": "none", "mask_high": 1.3}, advantages="dr_grpo")
    result = step_on(rank, packed).metrics.result()
    bounds = list(itertools.pairwise(packed.cu_seqlens.tolist()))
    # a sequence that keeps k of n tokens pulls with k / n of its weight
    shares = torch.tensor([int(keep[start:end].sum()) / packed.loss_mask[start:end].sum() for start, end in bounds], dtype=torch.float64)
    assert float(shares.min()) < 1.0
    assert result["train/loss/mean"] == pytest.approx(float((gepo(logprobs.detach(), packed, keep) * shares).mean()), abs=1e-6)
