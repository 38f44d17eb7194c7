"""PPO's critic written plainly, in float64: one sequence at a time, generalized advantage estimation as a loop over sampled tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from asyncrl.train.batch import PackedBatch
from tests.train.plain_logprobs import plain_model

LEARNING_RATE, EPS = 1e-2, 0.1
"""Of AdamW; with so large an eps its update follows the gradient smoothly, and rounding stays rounding."""


@dataclass(frozen=True)
class Discount:
    gamma: float
    lam: float


class PlainCritic(nn.Module):
    """What the model of a folder makes of what came before a token, and a head of zeros."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.lm = plain_model(folder).base_model
        self.head = nn.Linear(self.lm.config.hidden_size, 1).double()
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.updates = 0
        """Those that had a gradient at all."""
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), eps=EPS, weight_decay=0.0)

    def values(self, batch: PackedBatch) -> list[Tensor]:
        """Of the loss tokens of each sequence."""
        found = []
        for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
            hidden = self.lm(input_ids=torch.from_numpy(batch.tokens[start:end]).long()[None], use_cache=False).last_hidden_state[0]
            places = np.flatnonzero(batch.loss_mask[start:end])
            found.append(self.head(hidden[places - 1])[:, 0])
        return found

    def step(self, batch: PackedBatch, *, discount: Discount, clip: float, shares: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Trains on each share of the sequences in turn; advantages and returns of all loss tokens, end to end."""
        with torch.no_grad():
            old = self.values(batch)
        rewards = batch.rewards[batch.rollout_ids]
        earned = [plain_gae(values.tolist(), float(reward), discount) for values, reward in zip(old, rewards, strict=True)]
        for share in shares:
            values = self.values(batch)
            losses = []
            for n in share:
                returns = torch.tensor(earned[n][1], dtype=torch.float64)
                held = old[n] + (values[n] - old[n]).clamp(-clip, clip)
                losses.append(0.5 * torch.maximum((values[n] - returns).square(), (held - returns).square()))
            self.optimizer.zero_grad()
            torch.cat(losses).mean().backward()
            if any(parameter.grad is not None and parameter.grad.any() for parameter in self.parameters()):
                self.optimizer.step()
                self.updates += 1
        advantages, returns = (np.concatenate([np.array(each[part]) for each in earned]) for part in (0, 1))
        return advantages, returns


def plain_gae(values: list[float], reward: float, discount: Discount) -> tuple[list[float], list[float]]:
    """Of one sequence, whose reward comes with its last sampled token."""
    advantages = [0.0] * len(values)
    later, coming = 0.0, 0.0
    for t in reversed(range(len(values))):
        delta = (reward if t == len(values) - 1 else 0.0) + discount.gamma * coming - values[t]
        advantages[t] = later = delta + discount.gamma * discount.lam * later
        coming = values[t]
    return advantages, [advantage + value for advantage, value in zip(advantages, values, strict=True)]
