"""AdamW on float32 master weights, with the gradient checked before it may touch them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from asyncrl.errors import ConfigError
from asyncrl.train.optim_groups import group_of, names_of
from asyncrl.train.optimizer_config import OptimizerSettings
from asyncrl.train.parallel import Ranks, local
from asyncrl.weights.density import Travel

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of AdamW's state tensors."""
VISITING_BYTES = 256 << 20
"""Moments that lie in CPU memory visit the device so many bytes at a time: enough to hide the start of a copy."""
_FUSED_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Update:
    """What one call of `Optimizer.update` did."""

    grad_norm: float
    """Over all parameters and ranks, before clipping; NaN or infinite when the gradient is."""
    skipped: Literal["nonfinite", "zero"] | None
    """Why nothing changed: the gradient was not finite, or exactly 0 everywhere (momentum alone never moves the policy)."""


@dataclass(frozen=True, slots=True, eq=False)
class _Trained:
    """A parameter that trains, its moments, laid out as it is, and what AdamW is told of it."""

    parameter: nn.Parameter
    moments: tuple[Tensor, Tensor]
    factor: float
    weight_decay: float


class Optimizer:
    """Steps those of the parameters that need a gradient. Every rank makes the same calls.

    Args:
        parameters: by name; a tied weight may stand under each of its names, its moments go by the first.
        config: rates, patterns and limits.
        ranks: whose gradient it is.

    Raises ConfigError for master weights that are not float32, and for a pattern that matches nothing.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter] | Iterable[tuple[str, nn.Parameter]], *, config: OptimizerSettings,
                 ranks: Ranks) -> None:
        named = parameters.items() if isinstance(parameters, Mapping) else parameters
        names = {parameter: known for parameter, known in names_of(named).items() if parameter.requires_grad}
        for parameter, (name, *_) in names.items():
            _require_float32(name, parameter)
        groups = group_of(names, config.learning_rate_groups)
        self._config, self._ranks = config, ranks
        self._trained: dict[str, _Trained] = {}
        for parameter, (name, *_) in names.items():
            group = groups[parameter]
            decay = config.weight_decay if parameter.ndim > 1 else 0.0
            moments = (self._zeros_like(parameter), self._zeros_like(parameter))
            self._trained[name] = _Trained(parameter, moments, factor=group.factor if group else 1.0,
                                           weight_decay=decay if group is None or group.weight_decay is None else group.weight_decay)
        self.updates = 0
        """Applied since the start: AdamW's own step count."""
        self.travel = Travel()
        """What updates added since somebody put a new one here, in learning rates of a factor of 1."""

    @torch.no_grad()
    def update(self, *, version: int, scale: float = 1.0) -> Update:
        """Clip the accumulated gradients, step, and clear them; or clear them alone, when they are not fit to step on.

        The learning rate is that of `version`, times `scale`.
        """
        moved = [trained for trained in self._trained.values() if trained.parameter.grad is not None]
        gradients = [local(trained.parameter.grad) for trained in moved]
        norm = self._norm(gradients)
        skipped = "nonfinite" if not math.isfinite(norm) else "zero" if norm == 0.0 else None
        if skipped is None:
            if norm > self._config.max_grad_norm:
                torch._foreach_mul_(gradients, self._config.max_grad_norm / norm)
            learning_rate = self._config.learning_rate_at(version) * scale
            for share in self._shares(moved):
                self._step(share, learning_rate=learning_rate)
            self.updates += 1
            self.travel = self.travel.after(learning_rate)
        for trained in self._trained.values():
            trained.parameter.grad = None
        return Update(grad_norm=norm, skipped=skipped)

    def moments(self) -> dict[str, Tensor]:
        """AdamW's state by `MOMENT/parameter`, to be saved and loaded in place."""
        return {f"{moment}/{name}": tensor for name, trained in self._trained.items()
                for moment, tensor in zip(MOMENTS, trained.moments, strict=True)}

    def trained(self) -> Iterator[tuple[nn.Parameter, float]]:
        """Every parameter it steps, once, with the factor of its learning rate."""
        return ((trained.parameter, trained.factor) for trained in self._trained.values())

    def _shares(self, moved: list[_Trained]) -> Iterator[list[_Trained]]:
        """Parameters that one call of a kernel takes: of one rate and decay, and no more at once than may visit the device."""
        held = [trained for trained in moved if local(trained.parameter).numel()]
        held.sort(key=lambda trained: (trained.factor, trained.weight_decay))
        for _, alike in itertools.groupby(held, key=lambda trained: (trained.factor, trained.weight_decay)):
            share, size = [], 0
            for trained in alike:
                visiting = 2 * local(trained.parameter).nbytes if self._config.offload_optimizer else 0
                if share and size + visiting > VISITING_BYTES:
                    yield share
                    share, size = [], 0
                share.append(trained)
                size += visiting
            yield share

    def _step(self, share: list[_Trained], *, learning_rate: float) -> None:
        parameters = [local(trained.parameter) for trained in share]
        moments = [[local(trained.moments[n]) for trained in share] for n in range(len(MOMENTS))]
        visiting = moments
        device = parameters[0].device
        if self._config.offload_optimizer:
            visiting = [[moment.to(device, copy=True, non_blocking=True) for moment in tensors] for tensors in moments]
        fused = self._is_fused(device)
        steps = torch.full((len(share),), float(self.updates), device=device if fused else "cpu").unbind()
        adamw(parameters, [local(trained.parameter.grad) for trained in share], *visiting, [], list(steps), fused=fused, foreach=not fused,
              amsgrad=False, beta1=self._config.betas[0], beta2=self._config.betas[1], lr=learning_rate * share[0].factor,
              weight_decay=share[0].weight_decay, eps=self._config.eps, maximize=False)
        if visiting is not moments:
            for at_home, visitor in zip(itertools.chain(*moments), itertools.chain(*visiting), strict=True):
                at_home.copy_(visitor)  # waits: a checkpoint may read them from the CPU

    def _is_fused(self, device: torch.device) -> bool:
        if self._config.adamw == "fused" and device.type not in _FUSED_DEVICES:
            raise ConfigError("trainer.adamw", value="fused", allowed=f"fused on {', '.join(_FUSED_DEVICES)}; this is {device.type}",
                              remedy="Set trainer.adamw to auto.")
        return self._config.adamw != "foreach" and device.type in _FUSED_DEVICES

    def _zeros_like(self, parameter: nn.Parameter) -> Tensor:
        if not self._config.offload_optimizer:
            return torch.zeros_like(parameter, requires_grad=False)
        zeros = torch.zeros_like(local(parameter), device="cpu", requires_grad=False, pin_memory=self._ranks.device.type == "cuda")
        # Of the mesh of its parameter, and yet on the CPU: `from_local` would move it to the mesh's device.
        return DTensor(zeros, parameter._spec, requires_grad=False) if isinstance(parameter, DTensor) else zeros

    def _norm(self, gradients: list[Tensor]) -> float:
        squares = torch.zeros((), dtype=torch.float64, device=self._ranks.device)
        if gradients:
            squares += torch.stack(torch._foreach_norm(gradients)).double().square().sum()
        return math.sqrt(float(self._ranks.sum(squares)))


def _require_float32(name: str, parameter: nn.Parameter) -> None:
    """The numbers are measured: tests/train/test_optim.py."""
    if parameter.dtype != torch.float32:
        raise ConfigError("model", value=f"{name} is {parameter.dtype}", allowed="float32 master weights",
                          remedy="Updates of RL size vanish in half precision: after 1000 steps of 3e-6 a weight of 0.019 still is "
                                 "0.01904 in bfloat16, and 0.0160 in float32.")
