"""Where proximal logprobs come from, update by update: computed by the very forwards that train, or guessed between versions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from asyncrl.correction.proximal import log_linear_alpha
from asyncrl.train import step
from asyncrl.train.batch import PackedBatch
from asyncrl.train.rank import RankTrainer
from tests.train.test_step_correction import LOG_LINEAR, stale_batch
from tests.train.train_data import inline_rank, step_on

MINIBATCHES, EPOCHS = 2, 2


@dataclass(frozen=True)
class Forward:
    """What one micro-batch saw of its tokens."""

    places: Tensor
    logprobs: Tensor
    log_ratio: Tensor


def updates_of(rank: RankTrainer, packed: PackedBatch, monkeypatch: pytest.MonkeyPatch) -> list[list[Forward]]:
    """The micro-batches of each update of a step."""
    updates: list[list[Forward]] = [[]]
    backward, update = step.backward, rank._trainee.optimizer.update

    def watched(*arguments: object, inputs: object, **named: object) -> Tensor:
        rows = backward(*arguments, inputs=inputs, **named)
        updates[-1].append(Forward(inputs.places, logprobs=rows[0], log_ratio=rows[4]))
        return rows

    def updating(**named: object) -> object:
        updates.append([])
        return update(**named)

    monkeypatch.setattr(step, "backward", watched)
    monkeypatch.setattr(rank._trainee.optimizer, "update", updating)
    step_on(rank, packed)
    return updates[:-1]


@pytest.mark.parametrize("microbatch_tokens", [4096, 20])
@pytest.mark.parametrize("loss", ["decoupled_ppo", {"kind": "gspo", "entropy_coefficient": 0.01}])
def test_the_ratio_of_the_first_minibatch_is_exactly_1_and_later_ones_have_moved(loss: object, microbatch_tokens: int, tiny: Path,
                                                                                 tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = inline_rank(tiny, tmp_path, minibatches_per_step=MINIBATCHES, epochs=EPOCHS, microbatch_tokens=microbatch_tokens, loss=loss)
    first, *later = updates_of(rank, stale_batch(0), monkeypatch)
    assert len(later) == MINIBATCHES * EPOCHS - 1
    assert (len(first) > 1) == (microbatch_tokens == 20)
    assert all(torch.equal(forward.log_ratio, torch.zeros_like(forward.log_ratio)) for forward in first)
    assert all(forward.log_ratio.any() for update in later for forward in update)


def test_weights_that_stay_leave_every_ratio_at_exactly_1(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A learning rate below the precision of any weight."""
    rank = inline_rank(tiny, tmp_path, minibatches_per_step=MINIBATCHES, epochs=EPOCHS, microbatch_tokens=20, learning_rate=1e-30)
    assert not any(forward.log_ratio.any() for update in updates_of(rank, stale_batch(1), monkeypatch) for forward in update)


def test_a_guess_is_another_at_every_update_and_exact_at_the_first(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = stale_batch(2)
    rank = inline_rank(tiny, tmp_path, correction=LOG_LINEAR, minibatches_per_step=MINIBATCHES, epochs=EPOCHS, microbatch_tokens=20)
    updates = updates_of(rank, packed, monkeypatch)
    rollout, versions = torch.from_numpy(packed.rollout_logprobs), torch.from_numpy(packed.policy_versions)
    assert not any(forward.log_ratio.any() for forward in updates[0])
    for number, update in enumerate(updates[1:], start=1):
        alpha = log_linear_alpha(versions, proximal_version=3, current_version=3 + number / len(updates))
        for forward in update:
            expected = (1 - alpha[forward.places]) * (forward.logprobs - rollout[forward.places])
            torch.testing.assert_close(forward.log_ratio, expected, rtol=1e-4, atol=1e-5)
            assert float(expected.abs().max()) > 0.1


def test_what_one_update_reuses_is_what_a_pass_would_have_given(tiny: Path, tmp_path: Path) -> None:
    """The batch as it is recorded: proximal logprobs of the forward that trained, or of a pass that a rule over sequences asks for."""
    veto = {"kind": "custom", "truncate_high": 2.0, "reject": [{"kind": "veto", "low": 1e-8}]}
    reused, computed = (step_on(inline_rank(tiny, tmp_path, correction=correction, microbatch_tokens=20), stale_batch(3)).tokens
                        for correction in ("token_tis", veto))
    assert torch.equal(reused.proximal_logprobs, computed.proximal_logprobs)
