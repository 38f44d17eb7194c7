"""Tensors of which a tensor-parallel rank holds a part."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from asyncrl.weights.codec import Changes
from tests.weights.loaders import HIDDEN, VOCAB, bits, entry_of, memory, meta, recorded


class Ranked(nn.Module):
    """One of two ranks: rows of one tensor, columns of another, a share of a padded vocabulary, all of a norm."""

    def __init__(self, rank: int, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.rank = rank
        self.embed = nn.Parameter(torch.full((4, HIDDEN), 0.5, dtype=dtype))
        self.up = nn.Parameter(torch.full((3, HIDDEN), 0.5, dtype=dtype))
        self.down = nn.Parameter(torch.full((HIDDEN, 3), 0.5, dtype=dtype))
        self.norm = nn.Parameter(torch.full((HIDDEN,), 0.5, dtype=dtype))

    def load_weights(self, weights) -> None:
        low = self.rank * 4
        for name, tensor in weights:
            if name == "embed":
                found = tensor[low:min(low + 4, len(tensor))]
                self.embed.data[:len(found)].copy_(found)
                self.embed.data[len(found):].fill_(0)
            elif name == "up":
                self.up.data.copy_(tensor.narrow(0, 3 * self.rank, 3))
            elif name == "down":
                self.down.data.copy_(tensor.narrow(1, 3 * self.rank, 3))
            else:
                self.norm.data.copy_(tensor)


def ranked(vocab=VOCAB):
    return {"embed": (vocab, HIDDEN), "up": (6, HIDDEN), "down": (HIDDEN, 6), "norm": (HIDDEN,)}


def test_a_rank_may_hold_a_part_and_says_so():
    found = recorded(Ranked(1), shard=True, **meta(ranked()))
    assert not found.whole
    assert {name: sum(box.elements for box in target.boxes) for name, target in found.routed.items()} == {
        "embed": 4, "up": 12, "down": 12, "norm": 4}
    assert "embed" not in recorded(Ranked(1), shard=True, **meta(ranked(vocab=4))).routed


@pytest.mark.parametrize("dense", [False, True])
def test_what_lies_here_is_a_shorter_run_of_rows_and_indices_of_columns(dense):
    targets = recorded(Ranked(1), shard=True, **meta(ranked())).routed
    indices = None if dense else np.array([0, 4, 11, 13, 20, 23])

    def here(name):
        values = np.arange(24 if dense else 6, dtype=np.uint16)
        return [(entry.start, entry.length, None if changes.indices is None else changes.indices.tolist(), changes.values.tolist())
                for entry, changes in targets[name].here(entry_of(targets[name]), Changes(indices, values))]

    columns = [row * 6 + column for row in range(4) for column in (3, 4, 5)]
    assert here("up") == ([(12, 12, None, list(range(12, 24)))] if dense else [(12, 12, [1, 8, 11], [3, 4, 5])])
    assert here("down") == ([(0, 24, columns, columns)] if dense else [(0, 24, [4, 11, 23], [1, 2, 5])])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_two_ranks_that_write_what_is_theirs_hold_what_each_would_load(dtype):
    values = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in ranked().items()}
    for rank in (0, 1):
        loaded, patched = Ranked(rank, dtype), Ranked(rank, dtype)
        with torch.no_grad():
            loaded.load_weights(values.items())
            patched.embed[1:] = loaded.embed[1:] * (rank == 1)  # what pads the vocabulary is not published
        for name, target in recorded(patched, shard=True, **meta(ranked())).routed.items():
            everything = Changes(None, bits(values[name]))
            for entry, changes in target.here(entry_of(target), everything):
                target.write(entry, changes)
                assert np.array_equal(target.read(entry, changes), changes.values)
        assert all(torch.equal(one, other) for one, other in zip(memory(loaded).values(), memory(patched).values(), strict=True))


def test_a_whole_shard_of_columns_is_one_slice_of_memory(monkeypatch):
    model = Ranked(1)
    target = recorded(model, shard=True, **meta(ranked())).routed["down"]
    monkeypatch.setattr(torch.Tensor, "index_copy_", None)
    monkeypatch.setattr(torch.Tensor, "index_select", None)
    for entry, changes in target.here(entry_of(target, start=4, length=14), Changes(None, np.arange(14, dtype=np.uint16))):
        target.write(entry, changes)
    assert bits(model.down.data).tolist() == [*bits(torch.full((1,), 0.5, dtype=torch.bfloat16)).tolist() * 1, 0, 1, 5, 6, 7, 11, 12, 13,
                                             *bits(torch.full((3,), 0.5, dtype=torch.bfloat16)).tolist()]
