"""Every backend against attention written out, one sequence at a time: values and gradients, with what packing and models ask for."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from asyncrl.errors import ConfigError
from asyncrl.train.attention import PackedSegments, Scoring, attend_by_sequence, packed
from asyncrl.train.attention_choice import choose
from asyncrl.train.flex import BLOCK, attend_flex, block_mask
from tests.devices import DEVICES, NEEDS_GPU
from tests.train.families import make_family
from tests.train.train_data import inline_rank, random_batch, step_on

HEADS, HEAD_DIM, SCALING = 4, 16, 0.3
RUNS = ((2, 3), (1, 7), (3, 12))
LENGTHS = [3, 3, 7, 12, 12, 12]


def shared_segments(device: str) -> tuple[PackedSegments, int]:
    """The last two sequences begin with four tokens that have one row each; the rows lie in another order than the sequences."""
    total = sum(LENGTHS)
    canonical = torch.arange(total)
    canonical[total - 12:total - 8] = torch.arange(total - 24, total - 20)
    first, rows = canonical.unique(return_inverse=True)
    turned = torch.arange(len(first)).flip(0)
    return PackedSegments(RUNS, turned[rows].to(device), first.flip(0).to(device)), len(first)


def rows_of(count: int, heads: int, *, seed: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.randn(1, heads, count, HEAD_DIM, generator=torch.Generator().manual_seed(seed))
    return values.to(device, dtype).requires_grad_()


def written_out(query: Tensor, key: Tensor, value: Tensor, *, segments: PackedSegments, window: int | None,
                softcap: float | None) -> Tensor:
    """[U, H, D] by one softmax over all rows of each sequence."""
    def whole(rows: Tensor) -> Tensor:
        rows = rows[0].double() if segments.expand is None else rows[0].double()[:, segments.expand]
        return rows.repeat_interleave(HEADS // len(rows), dim=0)

    q, k, v = (whole(x) for x in (query, key, value))
    scores = q @ k.transpose(1, 2) * SCALING
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).to(q.device)
    places = torch.arange(len(sequence), device=q.device)
    behind = places[:, None] - places[None]
    seen = (sequence[:, None] == sequence[None]) & (behind >= 0) & (behind < (window or len(sequence)))
    mixed = (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1)
    return mixed if segments.collapse is None else mixed[segments.collapse]


def flash(*args: Tensor, **settings: object) -> Tensor:
    from asyncrl.train.flash import attend_flash

    return attend_flash(*args, **settings)


HAS_FLASH = pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="needs flash-attn")
BACKENDS = [pytest.param(attend_by_sequence, "cpu", id="sdpa cpu"), pytest.param(attend_flex, "cpu", id="flex cpu"),
            pytest.param(attend_by_sequence, "cuda", marks=NEEDS_GPU, id="sdpa cuda"),
            pytest.param(attend_flex, "cuda", marks=NEEDS_GPU, id="flex cuda"),
            pytest.param(flash, "cuda", marks=[*NEEDS_GPU, HAS_FLASH], id="flash cuda")]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 5, 12, 100])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("attend", "device"), BACKENDS)
def test_a_backend_equals_attention_written_out(attend: object, device: str, shared: bool, window: int | None, softcap: float | None,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()  # a case that is compiled anew for others counts against a limit
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)  # the CPU's gradient is slow, which is why torch refuses it
    dtype = torch.bfloat16 if attend is flash else torch.float32
    segments, count = shared_segments(device) if shared else (PackedSegments(RUNS, None, None), sum(LENGTHS))
    inputs = [rows_of(count, heads, seed=seed, device=device, dtype=dtype) for seed, heads in enumerate((HEADS, 2, 2))]
    ours, weights = packed(attend)(torch.nn.Module(), *inputs, None, segments=segments, scaling=SCALING, sliding_window=window,
                                   softcap=softcap)
    assert ours.shape == (1, count, HEADS, HEAD_DIM)
    assert weights is None
    theirs = written_out(*inputs, segments=segments, window=window, softcap=softcap)
    tolerance = {"rtol": 0, "atol": 5e-2 if dtype == torch.bfloat16 else 1e-2 if device == "cuda" else 1e-5}
    torch.testing.assert_close(ours[0].double(), theirs, **tolerance)
    factors = torch.linspace(-1, 1, theirs.numel(), dtype=torch.float64, device=device).view_as(theirs)
    gradients = (torch.autograd.grad((x * factors).sum(), inputs) for x in (ours[0].double(), theirs))
    for our, their in zip(*gradients, strict=True):
        torch.testing.assert_close(our, their, **tolerance)


@pytest.mark.parametrize("window", [None, 1, 100, 128, 200, 1000])
@pytest.mark.parametrize("lengths", [[1], [BLOCK], [BLOCK + 1], [300, 1, 127, 128, 5], [40] * 11, [1000]])
@pytest.mark.parametrize("device", DEVICES)
def test_blocks_are_those_that_hold_keys(device: str, lengths: list[int], window: int | None) -> None:
    ours = block_mask(lengths, window=window, device=torch.device(device))
    rows = sum(lengths) + -sum(lengths) % BLOCK
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    sequence = torch.cat([sequence, torch.arange(len(lengths), len(lengths) + rows - len(sequence))]).to(device)

    def sees(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return (sequence[row] == sequence[column]) & (column <= row) & (row - column < (window or rows))

    theirs = torch_flex.create_block_mask(sees, 1, 1, rows, rows, device=device, BLOCK_SIZE=BLOCK)
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    assert torch.equal(ours.kv_num_blocks, theirs.kv_num_blocks)
    assert torch.equal(ours.full_kv_num_blocks, theirs.full_kv_num_blocks)
    everywhere = torch.arange(rows, device=device)
    assert torch.equal(ours.mask_mod(0, 0, everywhere[:, None], everywhere[None]), sees(0, 0, everywhere[:, None], everywhere[None]))


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_mask_is_made_once_a_micro_batch_and_its_gradient_keeps_no_other(softcap: float | None) -> None:
    segments = PackedSegments(((1, 9), (2, 10)), None, None)
    rows = [torch.randn(29, 2, 8, requires_grad=True) for _ in range(3)]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        for window in (4, 4, None, None):
            attend_by_sequence(*rows, segments=segments, scoring=Scoring(1.0, window, softcap))
    whole = set() if softcap is None else {(9, 9), (10, 10)}
    assert set(segments._derived) == {(9, 4), (10, 4)} | whole
    masks = {tensor.data_ptr() for tensor in kept if tensor.dtype == torch.bool}
    assert masks <= {mask.data_ptr() for mask in segments._derived.values()}


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_micro_batch_has_dropped_its_masks_when_the_next_begins(checkpointing: str, tmp_path: Path,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[PackedSegments] = []
    once = PackedSegments.once

    def watched(segments: PackedSegments, key: object, make: Callable[[], object]) -> object:
        assert not any(other._derived for other in asked if other is not segments)
        asked.append(segments)
        return once(segments, key, make)

    model = make_family("gemma2, scores and logits capped", tmp_path / "model")
    rank = inline_rank(model, tmp_path, microbatch_tokens=32, epochs=2, attention="sdpa",
                       advantages={"kind": "gae"}, reference={"kind": "in_loss", "coefficient": 0.1},
                       activation_checkpointing=checkpointing)
    monkeypatch.setattr(PackedSegments, "once", watched)
    step_on(rank, random_batch(0))
    assert len({id(segments) for segments in asked}) > 3
    assert not any(segments._derived for segments in asked)


def model_with(**settings: int) -> object:
    return SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(**settings)))


MODEL, WIDE, LATENT = model_with(head_dim=64), model_with(head_dim=512), model_with(head_dim=64, v_head_dim=128)
NARROW = model_with(hidden_size=32, num_attention_heads=4)
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(("model", "device", "dtype", "packages", "chosen", "because"), [
    (MODEL, CPU, torch.float32, ["flash_attn", "triton"], "sdpa", "flex needs a GPU"),
    (MODEL, GPU, torch.bfloat16, ["flash_attn", "triton"], "flash", "fastest"),
    (MODEL, GPU, torch.bfloat16, ["triton"], "flex", "flash-attn is not installed"),
    (MODEL, GPU, torch.float32, ["flash_attn", "triton"], "flex", "trainer.dtype is float32"),
    (WIDE, GPU, torch.bfloat16, ["flash_attn", "triton"], "flex", "this model's have 512"),
    (LATENT, GPU, torch.bfloat16, ["flash_attn", "triton"], "flex", "of one width"),
    (NARROW, GPU, torch.float32, ["flash_attn", "triton"], "sdpa", "at least 16, this model's have 8"),
    (MODEL, GPU, torch.bfloat16, [], "sdpa", "triton, which is not installed")])
def test_the_fastest_that_can_be_had_is_chosen(model: object, device: torch.device, dtype: torch.dtype, packages: list[str], chosen: str,
                                               because: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in packages else None)
    choice = choose("auto", lm=model, device=device, dtype=dtype)
    assert (choice.backend, because in choice.reason) == (chosen, True)
    for backend in ("flash", "flex", "sdpa")[:("flash", "flex", "sdpa").index(chosen)]:
        with pytest.raises(ConfigError, match=rf"trainer\.attention = '{backend}'.*{chosen}.*trainer.attention to auto"):
            choose(backend, lm=model, device=device, dtype=dtype)
    assert choose("sdpa", lm=model, device=device, dtype=dtype).backend == "sdpa"
