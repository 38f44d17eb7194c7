import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.correction.aggregate import count
from asyncrl.correction.segments import Segments
from asyncrl.errors import ShapeError

NAN = float("nan")
MASK = torch.tensor([0, 1, 1, 1, 0, 1, 1, 0], dtype=torch.bool)
OFFSETS = torch.tensor([0, 4, 7, 7, 8])
TURNS = torch.tensor([-1, 0, 1, 1, 5, 0, 0, 9], dtype=torch.int16)
VALUES = torch.tensor([NAN, 1.0, 2.0, 6.0, float("inf"), 4.0, 8.0, NAN])


def test_sequences_without_loss_tokens_have_length_zero_and_sum_zero() -> None:
    segments = Segments.of_sequences(MASK, cu_seqlens=OFFSETS)
    assert segments.lengths.tolist() == [3.0, 2.0, 0.0, 0.0]
    assert segments.sum(VALUES).tolist() == [9.0, 12.0, 0.0, 0.0]
    assert segments.mean(VALUES).tolist() == [3.0, 6.0, 0.0, 0.0]
    assert segments.reduce(VALUES, how="max").tolist() == [6.0, 8.0, -np.inf, -np.inf]
    assert segments.reduce(VALUES, how="min").tolist() == [1.0, 4.0, np.inf, np.inf]
    assert segments.spread(segments.sum(VALUES))[MASK].tolist() == [9.0, 9.0, 9.0, 12.0, 12.0]


def test_turns_of_different_sequences_are_different_segments() -> None:
    segments = Segments.of_turns(MASK, cu_seqlens=OFFSETS, turn_ids=TURNS)
    assert segments.spread(segments.sum(VALUES))[MASK].tolist() == [1.0, 8.0, 8.0, 12.0, 12.0]
    assert segments.lengths.tolist() == [1.0, 2.0, 2.0]


def test_a_batch_without_loss_tokens_has_no_turns() -> None:
    none = torch.zeros(8, dtype=torch.bool)
    segments = Segments.of_turns(none, cu_seqlens=OFFSETS, turn_ids=TURNS)
    assert segments.lengths.tolist() == [0.0]
    assert segments.spread(segments.sum(VALUES)).shape == (8,)


@given(st.integers(0, 2**32 - 1))
def test_turns_need_not_be_neighbours(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 6, size=4)
    total = int(lengths.sum())
    mask, turns, values = rng.random(total) > 0.3, rng.integers(0, 3, total), rng.normal(size=total)
    rows = np.repeat(np.arange(4), lengths)
    segments = Segments.of_turns(torch.from_numpy(mask), cu_seqlens=torch.from_numpy(np.concatenate([[0], lengths.cumsum()])),
                                 turn_ids=torch.from_numpy(turns))
    got = segments.spread(segments.sum(torch.from_numpy(values)))
    for t in np.flatnonzero(mask):
        mates = mask & (rows == rows[t]) & (turns == turns[t])
        assert got[t].item() == pytest.approx(values[mates].sum(), abs=1e-12)


def test_gradient_flows_to_loss_tokens_alone() -> None:
    values = torch.arange(8.0, requires_grad=True)
    segments = Segments.of_sequences(MASK, cu_seqlens=OFFSETS)
    (segments.mean(values) * torch.tensor([1.0, 10.0, 100.0, 1000.0])).sum().backward()
    torch.testing.assert_close(values.grad, torch.tensor([0, 1 / 3, 1 / 3, 1 / 3, 0, 5, 5, 0]))


def test_float32_sums_are_accumulated_in_float64() -> None:
    values = torch.full((100_000,), 0.1)
    total = Segments.of_sequences(torch.ones(100_000, dtype=torch.bool), cu_seqlens=torch.tensor([0, 100_000])).sum(values)
    assert total.item() == pytest.approx(100_000 * float(np.float32(0.1)), rel=1e-12)


@pytest.mark.parametrize("offsets", [[0, 2], [0, 9], []])
def test_offsets_that_do_not_end_at_the_last_token_are_refused(offsets: list[int]) -> None:
    for make in (Segments.of_sequences, count):
        with pytest.raises(ShapeError, match="cu_seqlens must be"):
            make(MASK, cu_seqlens=torch.tensor(offsets, dtype=torch.int64))
