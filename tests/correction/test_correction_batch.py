from collections.abc import Callable

import pytest
import torch

from asyncrl.correction import CorrectionBatch, correct, preset
from asyncrl.errors import NonFiniteError, ShapeError, StalenessError

Make = Callable[..., CorrectionBatch]
NAN = float("nan")


def test_garbage_under_the_mask_passes_the_checks(packed: Make) -> None:
    packed().check()


@pytest.mark.parametrize(("changes", "message"), [
    ({"rollout_logprobs": torch.zeros(8)}, "rollout_logprobs"),
    ({"turn_ids": torch.zeros(9, 1, dtype=torch.int16)}, "turn_ids"),
    ({"cu_seqlens": torch.tensor([0, 9])}, "cu_seqlens"),
    ({"loss_mask": torch.ones(9, dtype=torch.int64)}, "loss_mask is torch.int64"),
    ({"advantages": torch.zeros(9, dtype=torch.int64)}, "advantages is torch.int64"),
    ({"policy_versions": torch.zeros(9)}, "policy_versions is torch.float32"),
])
def test_arrays_that_contradict_one_another_are_refused_at_once(packed: Make, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        packed(**changes)


@pytest.mark.parametrize("offsets", [[0, 4, 7, 8], [1, 4, 7, 9], [0, 7, 4, 9]])
def test_offsets_must_rise_from_zero_to_the_end(packed: Make, offsets: list[int]) -> None:
    with pytest.raises(ShapeError, match="cu_seqlens must rise from 0 to T = 9"):
        packed(cu_seqlens=torch.tensor(offsets)).check()


@pytest.mark.parametrize("field", ["rollout_logprobs", "proximal_logprobs", "advantages"])
@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")])
def test_a_non_finite_loss_token_is_named_by_index_and_sequence(packed: Make, field: str, value: float) -> None:
    values = torch.full((9,), -1.0)
    values[6] = value
    with pytest.raises(NonFiniteError, match=rf"{field}.*index 6, which is token 2 of sequence 1 \(1 such tokens\)"):
        correct(packed(**{field: values}), preset("token_tis"))


def test_a_loss_token_that_nobody_sampled_is_refused(packed: Make) -> None:
    with pytest.raises(ShapeError, match="no policy version sampled; got -1 at index 5"):
        packed(policy_versions=torch.tensor([-1, 3, 3, 4, -1, -1, 5, -1, 5])).check()


def test_negative_staleness_is_an_error(packed: Make) -> None:
    with pytest.raises(StalenessError, match="newer than version 4"):
        packed(version=4).check()


def test_an_empty_sequence_does_not_shift_the_blame(packed: Make) -> None:
    batch = packed(cu_seqlens=torch.tensor([0, 4, 4, 9]), advantages=torch.tensor([0.0] * 5 + [NAN] + [0.0] * 3))
    with pytest.raises(NonFiniteError, match="index 5, which is token 1 of sequence 2"):
        batch.check()


def test_versions_may_be_stored_in_fewer_bits_than_the_trainers_version_needs(packed: Make) -> None:
    packed(policy_versions=packed().policy_versions.to(torch.int8), version=300).check()


def test_large_finite_values_whose_sum_overflows_are_accepted(packed: Make) -> None:
    packed(advantages=torch.full((9,), 3e38)).check()


@pytest.mark.parametrize(("changes", "message"), [
    ({"cu_seqlens": torch.tensor([0, 4, 7, 9], dtype=torch.uint8)}, "cu_seqlens is torch.uint8"),
    ({"advantages": [0.0] * 9}, "advantages is a list"), ({"loss_mask": None}, "loss_mask is a NoneType"),
    ({"version": 3.5}, "version is 3.5"), ({"version": True}, "version is True"), ({"version": -1}, "version is -1"),
    ({"version": NAN}, "version is nan"), ({"version": 2**70}, "version is")])
def test_what_is_no_tensor_no_signed_offset_or_no_version_is_refused(packed: Make, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        packed(**changes)
