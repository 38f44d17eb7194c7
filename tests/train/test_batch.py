from pathlib import Path

import numpy as np
import pytest

from asyncrl.errors import NonFiniteError, RunAborted, ShapeError
from asyncrl.train.batch import PackedBatch, pack
from asyncrl.types import SequenceBuilder, Status
from tests.train.train_data import batch_of, rollout, sequence


def test_rollouts_lie_end_to_end_in_order() -> None:
    packed = pack(batch_of(rollout(7, 0, sequence([5, 6], [1, 2, 3], version=3), reward=1.0, temperature=0.5),
                           rollout(9, 0, sequence([4], [8], logprobs=[-0.25], version=4)), version=5))
    assert packed.tokens.tolist() == [5, 6, 1, 2, 3, 4, 8]
    assert packed.loss_mask.tolist() == [False, False, True, True, True, False, True]
    assert packed.cu_seqlens.tolist() == [0, 5, 7]
    assert packed.policy_versions.tolist() == [-1, -1, 3, 3, 3, -1, 4]
    assert packed.rollout_logprobs.tolist() == [0, 0, -2, -2, -2, 0, -0.25]
    assert packed.group_ids.tolist() == [7, 9]
    assert packed.rewards.tolist() == [1.0, 0.0]
    assert packed.temperatures.tolist() == [0.5, 1.0]
    assert (packed.version, packed.num_loss_tokens, packed.num_sampled_tokens) == (5, 4, 4)


def test_a_rollout_of_two_sequences_is_one_row_of_rewards() -> None:
    packed = pack(batch_of(rollout(0, 0, sequence([1], [2]), sequence([1, 3], [2]), reward=1.0), rollout(0, 1, sequence([1], [4]))))
    assert packed.rollout_ids.tolist() == [0, 0, 1]
    assert packed.rewards.tolist() == [1.0, 0.0]


def test_a_failed_rollout_keeps_its_tokens_and_loses_mask_and_place_in_the_baseline() -> None:
    packed = pack(batch_of(rollout(0, 0, sequence([1], [2, 3]), status=Status.REWARD_ERROR), rollout(0, 1, sequence([1], [2]), reward=1.0)))
    assert packed.valid.tolist() == [False, True]
    assert packed.loss_mask.tolist() == [False, False, False, False, True]
    assert packed.rewards.tolist() == [0.0, 1.0]
    assert packed.num_sampled_tokens == 3


def test_a_batch_of_rollouts_without_any_token_packs() -> None:
    packed = pack(batch_of(rollout(0, 0, status=Status.PROMPT_TOO_LONG)))
    assert packed.num_sampled_tokens == 0
    assert packed.cu_seqlens.tolist() == [0]


def test_the_first_token_of_a_sequence_cannot_be_trained() -> None:
    builder = SequenceBuilder([])
    builder.sampled(np.array([1], np.int32), logprobs=np.array([-1.0], np.float32), policy_version=0, kv_fresh=True, turn=0)
    with pytest.raises(ShapeError, match="sequence 0 has a trainable first token"):
        pack(batch_of(rollout(0, 0, builder.build())))


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_refused(reward: float) -> None:
    with pytest.raises(NonFiniteError, match=r"rewards\[1\]"):
        pack(batch_of(rollout(0, 0, sequence([1], [2])), rollout(0, 1, sequence([1], [2]), reward=reward)))


def test_a_batch_without_a_place_ends_the_run_and_says_so(tmp_path: Path) -> None:
    packed = pack(batch_of(rollout(7, 0, sequence([5, 6], [1, 2, 3])), version=2))
    with pytest.raises(RunAborted, match=r"the batch of version 2 cannot be written for the trainer: .*No such file"):
        packed.save(tmp_path / "away" / "batch.safetensors")


def test_a_saved_batch_loads_unchanged(tmp_path: Path) -> None:
    packed = pack(batch_of(rollout(7, 0, sequence([5, 6], [1, 2, 3])), version=2))
    packed.save(tmp_path / "batch.safetensors")
    loaded = PackedBatch.load(tmp_path / "batch.safetensors")
    assert loaded.version == 2
    for name in ("tokens", "loss_mask", "rollout_logprobs", "cu_seqlens", "group_ids", "valid", "temperatures"):
        before, after = getattr(packed, name), getattr(loaded, name)
        assert before.dtype == after.dtype
        assert np.array_equal(before, after)
