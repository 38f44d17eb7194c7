"""What a trial counts: by hand on a batch of a few tokens, and that the parts make the whole on any."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.correction import Correction, CorrectionBatch, preset, presets, weigh
from asyncrl.correction.rules import veto
from asyncrl.correction_cli.trial import Trial, attempt
from asyncrl.errors import ConfigError


def batch_of(ratios: list[list[float]], ages: list[list[int]], *, version: int = 30) -> CorrectionBatch:
    """Sequences of a masked first token and loss tokens of these ratios and ages."""
    lengths = [len(row) + 1 for row in ratios]
    log_ratio = np.concatenate([[np.nan, *np.log(row)] for row in ratios])
    mask = ~np.isnan(log_ratio)
    versions = np.concatenate([[-1, *(version - np.array(row, int))] for row in ages])
    rollout = np.full(len(mask), -30.0)
    return CorrectionBatch(
        rollout_logprobs=torch.from_numpy(rollout), proximal_logprobs=torch.from_numpy(rollout + log_ratio),
        advantages=torch.ones(len(mask), dtype=torch.float64), loss_mask=torch.from_numpy(mask),
        turn_ids=torch.zeros(len(mask), dtype=torch.int16), policy_versions=torch.from_numpy(versions),
        cu_seqlens=torch.tensor([0, *np.cumsum(lengths)]), group_ids=torch.zeros(len(lengths), dtype=torch.int64), version=version)


SOME = batch_of([[1.0, 4.0, 0.2], [1.0, 1e-6], [], [3.0]], [[0, 1, 1], [2, 2], [], [20]])


def test_tokens_are_counted_by_what_becomes_of_them() -> None:
    trial = attempt([SOME], Correction(truncate_high=2.0, mask_low=0.5, reject=(veto(1e-4),)))
    whole = trial.whole
    assert (whole.tokens, whole.kept, whole.truncated, whole.masked, whole.rejected) == (6, 3, 2, 2, 1)
    assert whole.weight_sum == pytest.approx(1.0 + 2.0 + 2.0)
    assert whole.ess_frac == pytest.approx(25.0 / (6 * 9.0))
    assert whole.gap_sum == pytest.approx(np.log(4) + np.log(5) + np.log(1e6) + np.log(3))
    assert (trial.sequences, trial.dropped_sequences) == (3, 1)
    assert trial.by_rule == {"veto": 2}


def test_tokens_are_told_apart_by_age_and_by_the_length_of_their_sequence() -> None:
    trial = attempt([SOME], preset("token_tis"))
    assert {age: (share.tokens, share.truncated) for age, share in trial.by_staleness.items()} == {
        0: (1, 0), 1: (2, 1), 2: (2, 0), 9: (1, 1)}
    assert {bucket: share.tokens for bucket, share in trial.by_length.items()} == {(1, 1): 1, (2, 2): 2, (3, 3): 3}


def test_every_batch_is_a_step_of_its_own() -> None:
    """What looks at the whole batch does not look over its edge."""
    other = dataclasses.replace(SOME, proximal_logprobs=SOME.rollout_logprobs + 0.001)
    normalised = Correction(truncate_high=2.0, normalize="token")
    both = attempt([SOME, other], normalised).whole
    assert both.weight_sum == pytest.approx(6.0 + 6.0)
    assert both == attempt([SOME], normalised).whole + attempt([other], normalised).whole


def test_a_batch_without_loss_tokens_has_no_parts() -> None:
    trial = attempt([dataclasses.replace(SOME, loss_mask=torch.zeros_like(SOME.loss_mask))], preset("icepop"))
    assert (trial.whole.tokens, trial.by_staleness, trial.by_length, trial.whole.ess_frac) == (0, {}, {}, None)


def test_weights_that_only_an_update_knows_are_not_tried() -> None:
    with pytest.raises(ConfigError, match="log_linear"):
        attempt([SOME], preset("areal/loglinear"))


@given(st.integers(0, 2**32 - 1), st.sampled_from([name for name in presets() if name != "areal/loglinear"]))
def test_the_parts_add_up_to_the_whole_and_to_what_weigh_says(seed: int, name: str) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 200, size=rng.integers(1, 6))
    batch = batch_of([np.exp(rng.normal(size=n) * 0.3).tolist() for n in lengths], [rng.integers(0, 12, size=n).tolist() for n in lengths])
    trial = attempt([batch], preset(name))
    corrected = weigh(batch, preset(name))
    assert trial.whole.kept == int(corrected.keep_mask.sum())
    assert trial.whole.weight_sum == pytest.approx(float(corrected.weights.sum()))
    assert trial.whole.tokens == trial.whole.kept + trial.whole.masked + trial.whole.rejected
    for parts in (trial.by_staleness, trial.by_length):
        assert_adds_up(trial, list(parts.values()))
    assert len(trial.by_length) <= 8


def assert_adds_up(trial: Trial, parts: list) -> None:
    for field in dataclasses.fields(trial.whole):
        assert sum(getattr(part, field.name) for part in parts) == pytest.approx(getattr(trial.whole, field.name)), field.name
