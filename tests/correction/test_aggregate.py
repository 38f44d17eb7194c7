import doctest

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.correction import aggregate as module
from asyncrl.correction.aggregate import Denominators, aggregate, count, scale
from asyncrl.errors import ConfigError, ShapeError

SEQUENCES = [[1.0, 2.0, 3.0], [4.0, 0.0], [-1.0], [2.0, 2.0, 2.0, 2.0], [0.5, 0.5]]
GLOBAL = {"token_mean": 1.5, "token_sum": 18.0, "seq_mean_token_sum": 3.6, "seq_mean_token_mean": 1.1, "dr_grpo": 0.72}


def pack(sequences: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    losses = torch.tensor([value for sequence in sequences for value in sequence], dtype=torch.float64)
    offsets = torch.tensor([0, *torch.tensor([len(s) for s in sequences]).cumsum(0).tolist()])
    return losses, torch.ones(len(losses), dtype=torch.bool), offsets


@pytest.mark.parametrize("mode", list(GLOBAL))
@pytest.mark.parametrize("split", [[5], [3, 2], [1, 1, 1, 1, 1], [2, 1, 2]])
def test_the_global_loss_is_the_same_for_every_split(mode: str, split: list[int]) -> None:
    _, mask, offsets = pack(SEQUENCES)
    denominators, total, start = count(mask, cu_seqlens=offsets), 0.0, 0
    for size in split:
        losses, mask, offsets = pack(SEQUENCES[start:start + size])
        total += aggregate(losses, loss_mask=mask, cu_seqlens=offsets, denominators=denominators, mode=mode,
                           max_tokens=5 if mode == "dr_grpo" else None).item()
        start += size
    assert total == pytest.approx(GLOBAL[mode], abs=1e-12)


def test_two_ranks_share_one_denominator() -> None:
    """Rank 0: 2 tokens of loss 1; rank 1: 8 tokens of loss 0. The mean is 0.2; a mean of means would say 0.5."""
    ranks = [torch.ones(2), torch.zeros(8)]
    masks = [torch.ones(len(losses), dtype=torch.bool) for losses in ranks]
    offsets = [torch.tensor([0, len(losses)]) for losses in ranks]
    shares = [count(mask, cu_seqlens=cu) for mask, cu in zip(masks, offsets, strict=True)]
    denominators = shares[0] + shares[1]
    assert denominators == Denominators(num_loss_tokens=10, num_loss_sequences=2)
    parts = [aggregate(losses, loss_mask=mask, cu_seqlens=cu, denominators=denominators).item()
             for losses, mask, cu in zip(ranks, masks, offsets, strict=True)]
    assert sum(parts) == pytest.approx(0.2)
    averaged = [losses.sum().item() * scale(denominators, averaging_ranks=2) for losses in ranks]
    assert sum(averaged) / 2 == pytest.approx(0.2)


def test_numerator_and_denominator_use_one_mask() -> None:
    mask = torch.arange(30) >= 5
    losses = torch.ones(30, requires_grad=True)
    cu_seqlens = torch.tensor([0, 5, 30])
    denominators = count(mask, cu_seqlens=cu_seqlens)
    assert denominators == Denominators(num_loss_tokens=25, num_loss_sequences=1)
    loss = aggregate(losses, loss_mask=mask, cu_seqlens=cu_seqlens, denominators=denominators)
    loss.backward()
    assert loss.item() == pytest.approx(1.0)
    torch.testing.assert_close(losses.grad, mask.float() / 25)


def test_what_the_mask_hides_is_ignored_even_when_it_is_nan() -> None:
    losses = torch.tensor([float("nan"), 2.0], requires_grad=True)
    loss = aggregate(losses, loss_mask=torch.tensor([False, True]), cu_seqlens=torch.tensor([0, 2]), denominators=Denominators(1, 1),
                     mode="seq_mean_token_mean")
    loss.backward()
    assert loss.item() == 2.0
    assert losses.grad.tolist() == [0.0, 1.0]


Masked = tuple[np.ndarray, np.ndarray]
"""Token losses and loss mask of one sequence."""


def plainly(sequences: list[Masked], mode: str, max_tokens: int) -> tuple[float, list[np.ndarray]]:
    """The loss and the gradient of each sequence's token losses, from the definition of the mode; nothing is packed or split."""
    kept = [losses[mask] for losses, mask in sequences]
    tokens, alive = max(sum(map(len, kept)), 1), max(sum(len(own) > 0 for own in kept), 1)
    weights = [{"token_mean": 1 / tokens, "token_sum": 1.0, "seq_mean_token_sum": 1 / alive, "dr_grpo": 1 / (alive * max_tokens),
                "seq_mean_token_mean": 1 / (alive * max(len(own), 1))}[mode] for own in kept]
    loss = sum(float(own.sum()) * weight for own, weight in zip(kept, weights, strict=True))
    return loss, [np.where(mask, weight, 0.0) for (_, mask), weight in zip(sequences, weights, strict=True)]


def packed(sequences: list[Masked]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Losses with gradient, mask, offsets."""
    losses, masks = (np.concatenate([np.zeros(0), *(sequence[part] for sequence in sequences)]) for part in (0, 1))
    offsets = np.concatenate([[0], np.cumsum([len(losses) for losses, _ in sequences])]).astype(np.int64)
    return torch.from_numpy(losses).requires_grad_(), torch.from_numpy(masks.astype(bool)), torch.from_numpy(offsets)


def spread(rng: np.random.Generator, numbers: np.ndarray, pieces: int) -> list[np.ndarray]:
    """Numbers at random over pieces, of any size, empty ones too."""
    owners = rng.integers(0, pieces, len(numbers))
    return [numbers[owners == piece] for piece in range(pieces)]


@given(st.integers(0, 2**32 - 1), st.sampled_from(list(GLOBAL)), st.integers(1, 4), st.sampled_from(["sums", "ranks", "microbatches"]))
def test_any_split_over_ranks_and_microbatches_gives_the_same_loss_and_gradient(seed: int, mode: str, ranks: int, averages: str) -> None:
    """An engine that adds up gradients, one that averages them over ranks, one that does so over each rank's own microbatches too."""
    rng = np.random.default_rng(seed)
    masks = [rng.random(length) > 0.3 for length in rng.integers(0, 6, rng.integers(1, 9))]
    sequences = [(np.where(mask, rng.normal(size=len(mask)), rng.choice([np.nan, np.inf, 7.0])), mask) for mask in masks]
    plan = [spread(rng, own, int(rng.integers(1, 6))) for own in spread(rng, np.arange(len(sequences)), ranks)]
    whole = sum((count(mask, cu_seqlens=offsets) for rank in plan for share in rank
                 for _, mask, offsets in [packed([sequences[n] for n in share])]), Denominators(0, 0))
    constant = 7 if mode == "dr_grpo" else None
    summing = "seq_mean_token_mean" if mode == "seq_mean_token_mean" else "token_sum"
    loss, wanted = 0.0, plainly(sequences, mode, 7)
    for rank in plan:
        over = {"sums": (1, 1), "ranks": (ranks, 1), "microbatches": (ranks, len(rank))}[averages]
        factor = scale(whole, mode=mode, max_tokens=constant, averaging_ranks=over[0], averaging_microbatches=over[1])
        for share in rank:
            losses, mask, offsets = packed([sequences[n] for n in share])
            loss += aggregate(losses, loss_mask=mask, cu_seqlens=offsets, denominators=whole, mode=mode, max_tokens=constant).item()
            summed = aggregate(losses, loss_mask=mask, cu_seqlens=offsets, denominators=Denominators(1, 1), mode=summing)
            (summed * factor).backward()
            gradient = losses.grad.numpy() / (over[0] * over[1])
            np.testing.assert_allclose(gradient, np.concatenate([np.zeros(0), *(wanted[1][n] for n in share)]), rtol=1e-12)
    assert loss == pytest.approx(wanted[0], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("mode", list(GLOBAL))
def test_a_share_without_tokens_adds_nothing(mode: str) -> None:
    """A rank may have no sequence at all, or sequences without a token; a reduction of nothing must not be NaN."""
    for offsets in ([0], [0, 0, 0]):
        losses, mask, cu_seqlens = torch.zeros(0, requires_grad=True), torch.zeros(0, dtype=torch.bool), torch.tensor(offsets)
        assert count(mask, cu_seqlens=cu_seqlens) == Denominators(0, 0)
        part = aggregate(losses, loss_mask=mask, cu_seqlens=cu_seqlens, denominators=Denominators(8, 2), mode=mode,
                         max_tokens=5 if mode == "dr_grpo" else None)
        part.backward()
        assert part.item() == 0.0


def test_a_fully_masked_sequence_weighs_nothing() -> None:
    """30 tokens, 5 of a truncated rollout masked: divisors are 25 tokens and 2 sequences, not 30 and 3."""
    mask = torch.arange(30) >= 5
    denominators = count(mask, cu_seqlens=torch.tensor([0, 5, 20, 30]))
    assert [1 / scale(denominators, mode=mode) for mode in ("token_mean", "seq_mean_token_sum")] == pytest.approx([25, 2])


def test_the_example_runs() -> None:
    assert doctest.testmod(module) == (0, 3)


@pytest.mark.parametrize("mode", list(GLOBAL))
def test_an_update_without_loss_tokens_has_loss_zero(mode: str) -> None:
    losses, mask, cu_seqlens = torch.ones(3, requires_grad=True), torch.zeros(3, dtype=torch.bool), torch.tensor([0, 1, 3])
    denominators = count(mask, cu_seqlens=cu_seqlens)
    loss = aggregate(losses, loss_mask=mask, cu_seqlens=cu_seqlens, denominators=denominators, mode=mode,
                     max_tokens=5 if mode == "dr_grpo" else None)
    loss.backward()
    assert denominators == Denominators(0, 0)
    assert loss.item() == 0.0
    assert losses.grad.tolist() == [0.0] * 3


def test_a_constant_length_belongs_to_dr_grpo_alone() -> None:
    for mode, max_tokens in (("dr_grpo", None), ("token_mean", 5), ("dr_grpo", 0)):
        with pytest.raises(ConfigError, match=r"loss\.max_tokens"):
            scale(Denominators(1, 1), mode=mode, max_tokens=max_tokens)
    for averaged in ({"averaging_ranks": 0}, {"averaging_microbatches": 0}):
        with pytest.raises(ConfigError, match="averaging_ranks, averaging_microbatches"):
            scale(Denominators(1, 1), **averaged)
    with pytest.raises(ConfigError, match="token_mean, token_sum"):
        scale(Denominators(1, 1), mode="mean")


def test_unequal_shapes_are_refused() -> None:
    with pytest.raises(ShapeError):
        aggregate(torch.ones(2), loss_mask=torch.ones(3, dtype=torch.bool), cu_seqlens=torch.tensor([0, 3]),
                  denominators=Denominators(3, 1))
    with pytest.raises(ShapeError):
        count(torch.ones(3), cu_seqlens=torch.tensor([0, 3]))
