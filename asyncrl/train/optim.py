"""AdamW on float32 master weights, with the gradient checked before it may touch them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from asyncrl.errors import ConfigError
from asyncrl.train.config import TrainerConfig
from asyncrl.train.parallel import Ranks, local

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of AdamW's state tensors."""


@dataclass(frozen=True, slots=True)
class Update:
    """What one call of `Optimizer.update` did."""

    grad_norm: float
    """Over all parameters and ranks, before clipping; NaN or infinite when the gradient is."""
    skipped: Literal["nonfinite", "zero"] | None
    """Why nothing changed: the gradient was not finite, or exactly 0 everywhere (momentum alone never moves the policy)."""


class Optimizer:
    """Steps the parameters it was made with. Every rank makes the same calls."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], *, config: TrainerConfig, ranks: Ranks) -> None:
        wrong = [name for name, parameter in parameters.items() if parameter.dtype != torch.float32]
        if wrong:
            raise ConfigError("model", value=f"{wrong[0]} is {parameters[wrong[0]].dtype}", allowed="float32 master weights",
                              remedy="Updates of RL size vanish in half precision.")
        self._parameters = dict(parameters)
        self._config, self._ranks = config, ranks
        matrices = [p for p in parameters.values() if p.ndim > 1]
        others = [p for p in parameters.values() if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW([group for group in groups if group["params"]], lr=config.learning_rate, betas=config.betas,
                                        eps=config.eps, fused=True)
        for parameter in parameters.values():
            self._adamw.state[parameter] = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device)}
            self._adamw.state[parameter] |= {moment: torch.zeros_like(parameter) for moment in MOMENTS}

    def update(self, *, version: int) -> Update:
        """Clip the accumulated gradients, step, and clear them; or clear them alone, when they are not fit to step on."""
        gradients = [local(p.grad) for p in self._parameters.values() if p.grad is not None]
        norm = self._norm(gradients)
        skipped = "nonfinite" if not math.isfinite(norm) else "zero" if norm == 0.0 else None
        if skipped is None:
            if norm > self._config.max_grad_norm:
                torch._foreach_mul_(gradients, self._config.max_grad_norm / norm)
            for group in self._adamw.param_groups:
                group["lr"] = self._config.learning_rate_at(version)
            self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        return Update(grad_norm=norm, skipped=skipped)

    @property
    def updates(self) -> int:
        """Updates applied since the start: AdamW's own step count."""
        return max((int(self._adamw.state[p]["step"]) for p in self._parameters.values()), default=0)

    @updates.setter
    def updates(self, count: int) -> None:
        for parameter in self._parameters.values():
            self._adamw.state[parameter]["step"].fill_(float(count))

    def moments(self) -> dict[str, Tensor]:
        """AdamW's state by `MOMENT/parameter`, to be saved and loaded in place."""
        return {f"{moment}/{name}": self._adamw.state[parameter][moment]
                for name, parameter in self._parameters.items() for moment in MOMENTS}

    def _norm(self, gradients: list[Tensor]) -> float:
        squares = torch.stack(torch._foreach_norm(gradients)).double().square().sum()
        return math.sqrt(float(self._ranks.sum(squares)))
