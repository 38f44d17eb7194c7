import pytest
import torch

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
    with pytest.raises(ConfigError, match="token_mean, token_sum"):
        scale(Denominators(1, 1), mode="mean")


def test_unequal_shapes_are_refused() -> None:
    with pytest.raises(ShapeError):
        aggregate(torch.ones(2), loss_mask=torch.ones(3, dtype=torch.bool), cu_seqlens=torch.tensor([0, 3]),
                  denominators=Denominators(3, 1))
    with pytest.raises(ShapeError):
        count(torch.ones(3), cu_seqlens=torch.tensor([0, 3]))
