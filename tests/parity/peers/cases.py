"""What a parity case is: a computation of a peer, ours for the same batch, and where the two are known to part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.correction import Correction, LossInputs, PolicyLoss, weigh
from asyncrl.correction.aggregate import Mode, aggregate, count
from asyncrl.correction.batch import CorrectionBatch
from tests.parity.peers.client import Arrays
from tests.parity.peers.scenes import Scene

NO_CORRECTION = Correction(level="none")
TOLERANCES = {"float64": 1e-6, "float32": 2e-5}

Loss = Callable[..., PolicyLoss]
Ours = Callable[[Scene], Arrays]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Case:
    """One test. `name` is what presets cite: `parity PEER/NAME`."""

    peer: str
    name: str
    computation: str
    """Of the peer's adapter."""
    ours: Ours
    """The same quantities by the names the adapter has for them; a packed [T] answers a padded one."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    arrays: Callable[[Scene], Arrays]
    """What the peer gets."""
    scene: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `Scene.draw`."""
    dtypes: tuple[str, ...] = ("float64", "float32")
    tolerance: float = 0.0
    """Wider than the dtype's own, for a peer that computes in float32 whatever it gets."""
    says_nothing: bool = False
    """Everything is dropped in every batch, and that is the point."""
    difference: str = ""
    """Why theirs is another; then `as_theirs` makes theirs of ours, exactly. In these words in docs/correction_peers.md."""
    as_theirs: Callable[[Scene, Arrays], Arrays] | None = None

    @property
    def evidence(self) -> str:
        """How a preset or a page cites it."""
        return f"{self.peer}/{self.name}"


def corrected(scene: Scene, correction: Correction) -> Arrays:
    """Our weights and what is kept."""
    result = weigh(scene.batch(), correction)
    return {"weights": result.weights.numpy(), "keep_mask": result.keep_mask.numpy()}


def loss_and_gradient(scene: Scene, function: Loss, *, correction: Correction = NO_CORRECTION, mode: Mode = "token_mean",
                      max_tokens: int | None = None, **settings: Any) -> Arrays:
    """Our loss of the scene and its gradient by the current logprobs; extra settings are the function's."""
    batch = scene.batch()
    result = weigh(batch, correction)
    inputs, current = LossInputs.of(batch, result), scene.tensor("logprobs").requires_grad_()
    losses = function(current, inputs=inputs, **settings).losses
    return backward(losses, batch=batch, counted=result.counted, current=current, mode=mode, max_tokens=max_tokens)


def backward(losses: torch.Tensor, *, batch: CorrectionBatch, counted: torch.Tensor, current: torch.Tensor, mode: Mode = "token_mean",
             max_tokens: int | None = None) -> Arrays:
    """Token losses made one number, and its gradient."""
    offsets = batch.cu_seqlens
    value = aggregate(losses, loss_mask=counted, cu_seqlens=offsets, denominators=count(counted, cu_seqlens=offsets), mode=mode,
                      max_tokens=max_tokens)
    value.backward()
    assert current.grad is not None
    return {"loss": np.asarray(value.item()), "gradient": current.grad.numpy()}


def ours_of(function: Loss, **settings: Any) -> Ours:
    """`loss_and_gradient` for a case."""
    return lambda scene: loss_and_gradient(scene, function, **settings)


def replaced(scene: Scene, **values: NDArray[Any]) -> Scene:
    """The scene with other arrays."""
    return Scene({**scene.arrays, **values}, scene.rewards, scene.lengths, scene.group_ids)


def first_update(scene: Scene) -> Scene:
    """The current logprobs are those at the start of the step."""
    return replaced(scene, logprobs=scene.arrays["proximal_logprobs"])


def one_anchor(scene: Scene) -> Scene:
    """The policy at the start of the step is the one that sampled."""
    return replaced(scene, proximal_logprobs=scene.arrays["rollout_logprobs"])
