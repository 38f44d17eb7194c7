import numpy as np
import pytest
import torch

from asyncrl.correction import CorrectionBatch, correct, preset
from asyncrl.correction.gap import mean_gap_by_staleness, split_gap

NAN = float("nan")


def test_the_gap_splits_exactly_where_the_own_versions_logprobs_are_known() -> None:
    split = split_gap(torch.tensor([-1.0, -0.5, NAN]), same_version_logprobs=torch.tensor([-1.25, -0.5, 3.0]),
                      proximal_logprobs=torch.tensor([-1.5, -0.25, NAN]), loss_mask=torch.tensor([True, True, False]))
    assert split.mismatch.tolist() == [-0.25, 0.0, 0.0]
    assert split.drift.tolist() == [-0.25, 0.25, 0.0]
    assert split.total.tolist() == [-0.5, 0.25, 0.0]


def test_the_mean_gap_of_a_staleness_counts_its_loss_tokens_alone() -> None:
    got = mean_gap_by_staleness(torch.tensor([0.5, -1.5, NAN, 0.25, 7.0]), staleness=torch.tensor([0, 0, 0, 30, 2]),
                                loss_mask=torch.tensor([True, True, False, True, False]))
    assert got == {0: 1.0, 30: 0.25}


def test_the_split_is_a_constant_offset_and_a_constant_speed() -> None:
    rng = np.random.default_rng(0)
    staleness = rng.integers(0, 4, 400)
    rollout = torch.from_numpy(-rng.exponential(1.0, 400))
    batch = CorrectionBatch(
        rollout_logprobs=rollout, proximal_logprobs=rollout - 0.02 - 0.1 * torch.from_numpy(staleness), advantages=rollout,
        loss_mask=torch.ones(400, dtype=torch.bool), turn_ids=torch.zeros(400, dtype=torch.int16),
        policy_versions=torch.from_numpy(9 - staleness), cu_seqlens=torch.tensor([0, 400]), group_ids=torch.tensor([0]), version=9)
    got = correct(batch, preset("none")).metrics.result()
    assert got["correction/gap_by_mismatch/value"] == pytest.approx(0.02)
    assert got["correction/gap_by_drift/value"] == pytest.approx(0.1 * staleness.mean())
    assert got["correction/gap_drift_per_version/value"] == pytest.approx(0.1)
