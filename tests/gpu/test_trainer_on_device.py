"""The trainer's modes on the CPU and, where there is one, on a GPU: the same gradient, in less memory where that is what they are for."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

from asyncrl.channel import Request
from asyncrl.train.logprobs import CHUNK_LOGITS, Head, Predictions, token_logprobs, token_objective
from tests.devices import DEVICES
from tests.gpu.one_rank import OneRank, relative_gap, step
from tests.tiny_model import make_tiny_model
from tests.train.families import make_family
from tests.train.train_data import inline_rank, random_batch

ROUNDING = {"cpu": 1e-6, "cuda": 2e-3}
"""Of float32 gradients against the CPU's, relative to the largest; flex on a GPU multiplies in TF32."""
BFLOAT16 = 0.1
"""Of gradients that bfloat16 computed: 8 bits through three layers."""
pytestmark = pytest.mark.filterwarnings("ignore")  # of torch about torch, while it imports its compiler


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The gradient that a trainer in this process has, on the CPU in float32."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        rank = inline_rank(model, tmp_path_factory.mktemp("store"), betas=(0.9, 0.95))
        step(rank, random_batch(0))
        return {name.removeprefix("exp_avg/"): moment / 0.1 for name, moment in rank._trainee.optimizer.moments().items()
                if name.startswith("exp_avg/")}


@pytest.mark.parametrize(("dtype", "least", "most"), [("float32", 0.0, None), ("bfloat16", 1e-6, BFLOAT16)])
def test_a_sharded_rank_has_the_gradient_of_one_alone(dtype: str, least: float, most: float | None, one_rank: OneRank, model: Path,
                                                      expected: dict[str, torch.Tensor]) -> None:
    gap = relative_gap(one_rank.gradient(model, dtype=dtype, attention="sdpa"), expected)
    assert least <= gap <= (ROUNDING[one_rank.device] if most is None else most)


def test_auto_computes_in_bfloat16_on_a_gpu_alone(one_rank: OneRank, model: Path) -> None:
    seen = []
    with one_rank.trainer(model) as rank:
        layer = rank._lm.model.layers[0].mlp.up_proj
        layer.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
        step(rank, random_batch(0))
        assert {parameter.dtype for parameter in rank._lm.parameters()} == {torch.float32}
    assert set(seen) == {torch.bfloat16 if one_rank.device == "cuda" else torch.float32}


@pytest.mark.parametrize("settings", [
    {"sharding": {"prefetch_layers": 0}}, {"sharding": {"prefetch_layers": 2}}, {"sharding": {"reshard_after_forward": False}},
    {"activation_checkpointing": "selective"}, {"activation_checkpointing": "full"}], ids=str)
def test_modes_of_memory_and_gathering_have_the_same_gradient(settings: dict[str, object], one_rank: OneRank, model: Path) -> None:
    plain = one_rank.gradient(model, dtype="float32", attention="sdpa")
    changed = one_rank.gradient(model, dtype="float32", attention="sdpa", **settings)
    assert relative_gap(changed, plain) <= (0 if one_rank.device == "cpu" else 1e-5)  # a GPU adds repeated rows in no fixed order


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("how", ["none", "full"])
@pytest.mark.parametrize("attention", ["sdpa", "flex"])
def test_compiled_layers_have_the_same_gradient(attention: str, how: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                expected: dict[str, torch.Tensor]) -> None:
    gpu = OneRank("cuda", tmp_path, monkeypatch)
    compiled = gpu.gradient(model, dtype="float32", attention=attention, compile=True, activation_checkpointing=how)
    assert relative_gap(compiled, expected) <= 2e-2


HAS_FLASH = pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="needs flash-attn")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("how", ["none", "selective", "full"])
@pytest.mark.parametrize("attention", ["flex", pytest.param("flash", marks=HAS_FLASH)])
def test_kernels_over_the_packed_row_have_the_same_gradient(attention: str, how: str, model: Path, tmp_path: Path,
                                                            monkeypatch: pytest.MonkeyPatch, expected: dict[str, torch.Tensor]) -> None:
    gpu = OneRank("cuda", tmp_path, monkeypatch)
    settings = {"attention": attention, "activation_checkpointing": how, "dtype": "bfloat16" if attention == "flash" else "float32"}
    assert relative_gap(gpu.gradient(model, **settings), expected) <= (BFLOAT16 if attention == "flash" else 2e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("attention", ["flex", pytest.param("flash", marks=HAS_FLASH)])
def test_windows_and_caps_hold_on_every_kernel(attention: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gemma, gpu = make_family("gemma2, heads of 16", tmp_path / "model"), OneRank("cuda", tmp_path, monkeypatch)
    dtype = "bfloat16" if attention == "flash" else "float32"
    plain = gpu.gradient(gemma, random_batch(0, longest=20), attention="sdpa", dtype="float32")
    assert relative_gap(gpu.gradient(gemma, random_batch(0, longest=20), attention=attention, dtype=dtype), plain) <= BFLOAT16


@pytest.mark.parametrize("way", ["recomputed", "in the forward"])
@pytest.mark.parametrize("device", DEVICES)
def test_the_head_is_computed_in_chunks_on_any_device(way: str, device: str) -> None:
    torch.manual_seed(0)
    rows, vocabulary, width = 96, 700, 32
    layer = nn.Linear(width, vocabulary, bias=False).to(device)
    hidden = torch.randn(rows, width).to(device).requires_grad_()
    predictions = Predictions(torch.randint(0, vocabulary, (rows,)).to(device), torch.rand(rows).to(device) + 0.5)
    head = Head.of(layer, chunk_logits=10 * vocabulary)
    if way == "recomputed":
        total = token_logprobs(hidden, head=head, predictions=predictions)[0].sum()
    else:
        total, *_ = token_objective(hidden, head=head, predictions=predictions, objective=lambda logprobs, entropy, chosen: logprobs.sum())
    ours = torch.autograd.grad(total, (hidden, layer.weight))
    logits = hidden.double() @ layer.weight.double().t() / predictions.temperatures.double()[:, None]
    plain = torch.log_softmax(logits, -1).gather(1, predictions.targets[:, None]).sum()
    for our, their in zip(ours, torch.autograd.grad(plain, (hidden, layer.weight)), strict=True):
        torch.testing.assert_close(our, their, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("way", ["recomputed", "in the forward"])
def test_the_head_needs_the_memory_of_chunks_not_of_all_logits(way: str) -> None:
    rows, vocabulary, width = 16_384, 100_000, 256
    layer = nn.Linear(width, vocabulary, bias=False, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    predictions = Predictions(torch.randint(0, vocabulary, (rows,), device="cuda"), torch.ones(rows, device="cuda"))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    if way == "recomputed":
        token_logprobs(hidden, head=Head.of(layer), predictions=predictions)[0].sum().backward()
    else:
        token_objective(hidden, head=Head.of(layer), predictions=predictions, objective=lambda logprobs, entropy, chosen: logprobs.sum()
                        )[0].backward()
    weight_gradients = 3 * 4 * layer.weight.numel()
    assert torch.cuda.max_memory_allocated() - before < 6 * 4 * CHUNK_LOGITS + weight_gradients < 4 * rows * vocabulary


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_more_is_computed_again_the_less_memory_a_step_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep, gpu = make_tiny_model(tmp_path / "deep", layers=12, hidden=256), OneRank("cuda", tmp_path, monkeypatch)
    peaks = []
    for how in ("none", "selective", "full"):
        with gpu.trainer(deep, activation_checkpointing=how, microbatch_tokens=1 << 14, attention="sdpa") as rank:
            step(rank, random_batch(0, groups=16, group_size=16, longest=60))
            torch.cuda.reset_peak_memory_stats()
            step(rank, random_batch(1, version=1, groups=16, group_size=16, longest=60))
            peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[0] > peaks[1] > peaks[2]


def test_steps_checkpoint_and_restore_on_any_device(one_rank: OneRank, model: Path, tmp_path: Path) -> None:
    with one_rank.trainer(model) as rank:
        for version in range(2):
            step(rank, random_batch(version, version=version))
        (tmp_path / "saved").mkdir()
        saved = rank.save(Request("save", body={"folder": str(tmp_path / "saved")}))
        rank.saved(Request("saved", body={"wait": True}))
        weights = {name: parameter.detach().clone() for name, parameter in rank._lm.named_parameters()}
        step(rank, random_batch(2, version=2))
        rank.restore(Request("restore", body={"folder": str(tmp_path / "saved"), "updates": saved["updates"]}))
        assert all(torch.equal(parameter, weights[name]) for name, parameter in rank._lm.named_parameters())
