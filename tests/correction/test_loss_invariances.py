"""What holds for every policy loss: garbage, order, split, precision, identity, overflow. Hand numbers are in the files of each."""

import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.correction import LossInputs, PolicyLoss, catalog, losses, sequence_losses
from asyncrl.errors import ShapeError
from tests.correction.loss_inputs import loss_inputs

NAN, INF = float("nan"), float("inf")
WEIGHTED = ("decoupled_ppo", "reinforce", "gspo", "gspo_token", "gmpo", "cispo", "cispo_absolute", "sapo", "aspo")
"""The anchor is the proximal policy, and the weights count."""
SURROGATES = ("decoupled_ppo", "ppo", "importance_sampling", "gspo", "gspo_token", "gmpo", "aspo", "prime_rl_dppo", "prime_rl_ipo", "m2po")
"""Their value is the gain itself: −A at ratio 1."""
SMOOTH = ("decoupled_ppo", "ppo", "importance_sampling", "gspo", "gmpo", "sapo", "prime_rl_dppo", "prime_rl_ipo", "m2po", "gepo", "dro")
"""Their gradient is that of their value; the others hold a part of it still."""


@dataclass(frozen=True)
class Scene:
    """A share of a batch: [T] logprobs, what the loss reads beside them, and the [T] group expectation of the whole batch."""

    logprobs: Tensor
    inputs: LossInputs
    expectation: Tensor


Loss = Callable[..., PolicyLoss]
LOSSES: dict[str, Loss] = {
    **{name: getattr(losses, name) for name in ("decoupled_ppo", "ppo", "reinforce", "importance_sampling")},
    **{name: getattr(sequence_losses, name) for name in ("gspo", "gspo_token", "gmpo")},
    **{name: getattr(catalog, name) for name in ("cispo", "cispo_absolute", "sapo", "aspo", "dppo_tv", "dppo_kl", "prime_rl_dppo",
                                                 "prime_rl_ipo", "vespo", "gepo", "dro")},
    "m2po": partial(catalog.m2po, tau=0.3)}
every = pytest.mark.parametrize("name", LOSSES)
seeds = st.integers(0, 2**32 - 1)


def run(name: str, scene: Scene) -> tuple[PolicyLoss, Tensor]:
    """The result, and the gradient of the sum of its losses."""
    leaf = scene.logprobs.clone().requires_grad_()
    extra = {"group_expectation": scene.expectation} if name == "gepo" else {}
    result = LOSSES[name](leaf, inputs=scene.inputs, **extra)
    (gradient,) = torch.autograd.grad(result.losses.sum(), leaf)
    return result, gradient


def draw(seed: int, *, garbage: float | None = None, dtype: torch.dtype = torch.float64) -> Scene:
    """Up to six sequences of up to six tokens, some without any. `garbage` lies in everything that was dropped."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 7, size=rng.integers(1, 7))
    tokens = int(lengths.sum())
    keep_mask = torch.from_numpy(rng.random(tokens) > 0.3)

    def values(numbers: np.ndarray) -> Tensor:
        clean = torch.from_numpy(numbers).to(dtype)
        return clean if garbage is None else torch.where(keep_mask, clean, garbage)

    rollout = -rng.random(tokens) * 3
    logprobs, proximal = rollout + rng.normal(0, 0.5, tokens), rollout + rng.normal(0, 0.5, tokens)
    advantages = np.repeat(rng.choice([-1.3, -0.4, 0.0, 0.7, 2.0], len(lengths)), lengths) + rng.choice([0.0, 0.5], tokens)
    offsets = torch.from_numpy(np.concatenate([[0], lengths.cumsum()]))
    inputs = LossInputs(rollout_logprobs=values(rollout), proximal_logprobs=values(proximal), advantages=values(advantages),
                        weights=values(rng.random(tokens) * 2), keep_mask=keep_mask, counted=keep_mask, cu_seqlens=offsets)
    groups = torch.from_numpy(rng.integers(0, 3, len(lengths)))
    expectation = catalog.log_group_expectation(inputs.rollout_logprobs, mask=keep_mask, cu_seqlens=offsets, group_ids=groups)
    return Scene(values(logprobs), inputs, expectation)


def taken(scene: Scene, sequences: list[int]) -> tuple[Scene, Tensor]:
    """These sequences in this order, and where their tokens were."""
    bounds = scene.inputs.cu_seqlens.tolist()
    places = torch.tensor([t for n in sequences for t in range(bounds[n], bounds[n + 1])], dtype=torch.long)
    names = [field.name for field in fields(scene.inputs) if field.name != "cu_seqlens"]
    lengths = scene.inputs.cu_seqlens.diff()[torch.tensor(sequences, dtype=torch.long)]
    inputs = replace(scene.inputs, **{name: getattr(scene.inputs, name)[places] for name in names},
                     cu_seqlens=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)))
    return Scene(scene.logprobs[places], inputs, scene.expectation[places]), places


def same(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


@every
@given(seed=seeds, garbage=st.sampled_from([NAN, INF, -INF, 1e30, 5.0]))
@settings(max_examples=20)
def test_nothing_that_was_dropped_reaches_loss_or_gradient(name: str, seed: int, garbage: float) -> None:
    clean, gradient = run(name, draw(seed))
    dirty, dirty_gradient = run(name, draw(seed, garbage=garbage))
    for got, wanted in ((dirty.losses, clean.losses), (dirty_gradient, gradient), (dirty.log_ratio, clean.log_ratio)):
        assert torch.equal(got, wanted)
        assert not got[~draw(seed).inputs.keep_mask].any()
    assert torch.equal(dirty.clipped, clean.clipped)
    assert not dirty.clipped[~draw(seed).inputs.keep_mask].any()


@every
@given(seed=seeds, order=st.randoms(use_true_random=False))
@settings(max_examples=20)
def test_neither_order_nor_microbatches_change_a_token(name: str, seed: int, order: random.Random) -> None:
    scene = draw(seed)
    whole, gradient = run(name, scene)
    sequences = list(range(len(scene.inputs.cu_seqlens) - 1))
    order.shuffle(sequences)
    cut = order.randint(0, len(sequences))
    for part in (sequences[:cut], sequences[cut:]):
        share, places = taken(scene, part)
        got, got_gradient = run(name, share)
        same(got.losses, whole.losses[places])
        same(got_gradient, gradient[places])
        assert torch.equal(got.clipped, whole.clipped[places])


@every
@pytest.mark.parametrize("seed", range(8))
def test_float32_agrees_with_float64(name: str, seed: int) -> None:
    single, single_gradient = run(name, draw(seed, dtype=torch.float32))
    double, double_gradient = run(name, draw(seed))
    assert single.losses.dtype == torch.float32
    assert double.losses.dtype == torch.float64
    torch.testing.assert_close(single.losses.double(), double.losses, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(single_gradient.double(), double_gradient, rtol=1e-5, atol=2e-6)


@every
def test_bfloat16_logprobs_are_computed_in_float32(name: str) -> None:
    scene = draw(3, dtype=torch.float32)
    result, gradient = run(name, replace(scene, logprobs=scene.logprobs.bfloat16()))
    rounded, _ = run(name, replace(scene, logprobs=scene.logprobs.bfloat16().float()))
    assert torch.equal(result.losses, rounded.losses)
    assert gradient.dtype == torch.bfloat16


@every
def test_a_kept_nan_reaches_the_loss(name: str) -> None:
    anchor = "proximal_logprobs" if name in WEIGHTED else "rollout_logprobs"
    read = ["advantages", *([] if name in ("reinforce", "gepo") else [anchor]), *(["weights"] if name in WEIGHTED else [])]
    scene = draw(5)
    place = int(scene.inputs.keep_mask.nonzero()[0])
    for field in ("logprobs", *read):
        broken = (scene.logprobs if field == "logprobs" else getattr(scene.inputs, field)).clone()
        broken[place] = NAN
        dirty = replace(scene, logprobs=broken) if field == "logprobs" else replace(scene, inputs=replace(scene.inputs, **{field: broken}))
        result, _ = run(name, dirty)
        assert result.losses[place].isnan(), field
        assert not result.losses[~scene.inputs.keep_mask].any()


@every
def test_a_share_without_kept_tokens_has_no_loss_and_no_gradient(name: str) -> None:
    nothing = torch.full((3,), NAN)
    inputs = loss_inputs(nothing, keep_mask=torch.zeros(3, dtype=torch.bool), weights=nothing, cu_seqlens=torch.tensor([0, 0, 2, 3]))
    result, gradient = run(name, Scene(nothing, inputs, nothing))
    assert result.losses.tolist() == gradient.tolist() == result.log_ratio.tolist() == [0.0] * 3
    assert not result.clipped.any()


@every
@pytest.mark.parametrize("far", [1000.0, -1000.0, 88.8])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_no_distance_between_the_policies_overflows(name: str, far: float, advantage: float) -> None:
    inputs = loss_inputs(torch.full((3,), advantage), proximal_logprobs=torch.full((3,), -1.0), cu_seqlens=torch.tensor([0, 1, 3]))
    result, gradient = run(name, Scene(torch.tensor([far - 1.0, far - 1.0, -1.0]), inputs, torch.full((3,), -1.0)))
    assert result.losses.isfinite().all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("name", SURROGATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_dropped_overflow_leaves_the_loss_of_the_other_token(name: str, dtype: torch.dtype) -> None:
    inputs = loss_inputs(torch.ones(2, dtype=dtype), keep_mask=torch.tensor([False, True]))
    result, gradient = run(name, Scene(torch.tensor([1000.0, 0.0], dtype=dtype), inputs, torch.zeros(2)))
    assert result.losses.sum().item() == -1.0
    assert gradient.tolist() == [0.0, -1.0]


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "gepo"])
def test_with_all_policies_equal_every_loss_is_reinforce(name: str) -> None:
    """Ratio 1: nothing is clipped, the gradient is −A, times the weight where the loss reads it."""
    scene = draw(11)
    same_policy = {"rollout_logprobs": scene.logprobs, "proximal_logprobs": scene.logprobs}
    per_sequence = torch.arange(6, dtype=torch.float64).repeat_interleave(scene.inputs.cu_seqlens.diff()[:6])[:len(scene.logprobs)] - 2.5
    inputs = replace(scene.inputs, **same_policy, advantages=per_sequence, weights=0.5 + per_sequence.abs())
    result, gradient = run(name, replace(scene, inputs=inputs))
    weights = inputs.weights if name in WEIGHTED else 1.0
    same(gradient, torch.where(inputs.keep_mask, -weights * inputs.advantages, 0.0))
    assert not result.clipped.any()


@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize("seed", range(4))
def test_the_gradient_is_that_of_the_value(name: str, seed: int) -> None:
    """The whole Jacobian: of losses over sequences, each token depends on all."""
    scene = draw(seed)
    extra = {"group_expectation": scene.expectation} if name == "gepo" else {}
    assert torch.autograd.gradcheck(lambda x: LOSSES[name](x, inputs=scene.inputs, **extra).losses, scene.logprobs.clone().requires_grad_())


@every
def test_what_is_frozen_has_no_gradient(name: str) -> None:
    scene = draw(7)
    floats = ("rollout_logprobs", "proximal_logprobs", "advantages", "weights")
    leaves = {field: getattr(scene.inputs, field).clone().requires_grad_() for field in floats}
    inputs = replace(scene.inputs, **{field: leaf * 1.0 for field, leaf in leaves.items()})
    logprobs = scene.logprobs.clone().requires_grad_()
    result = LOSSES[name](logprobs, inputs=inputs, **({"group_expectation": scene.expectation} if name == "gepo" else {}))
    assert not result.log_ratio.requires_grad
    result.losses.sum().backward()
    assert logprobs.grad is not None
    assert all(frozen.grad is None for frozen in leaves.values())


@every
def test_logprobs_of_another_length_are_refused(name: str) -> None:
    scene = draw(7)
    with pytest.raises(ShapeError, match="logprobs"):
        run(name, replace(scene, logprobs=torch.zeros(len(scene.logprobs) + 1, dtype=torch.float64)))
