"""The critic: a model of its own that says what each token's rest of the sequence will earn, and what trains it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from asyncrl.train.config import TrainerConfig
from asyncrl.train.critic_config import CriticConfig
from asyncrl.train.model import Body, ForwardInputs, load_policy
from asyncrl.train.optim import Optimizer
from asyncrl.train.parallel import Ranks
from asyncrl.train.ready import make_ready
from asyncrl.weights.torch_pieces import checkpoint_tensors


class Critic(Body):
    """Forward of one micro-batch: values [P] float32, each of what its target is sampled from, which is all before it."""

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__(lm)
        self.head = nn.Linear(lm.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Under the current weights. The last product is in float32, whatever computes the rest."""
        return linear(self.predicting(inputs).float(), self.head.weight.float(), self.head.bias.float())[:, 0]


@dataclass(frozen=True, slots=True, eq=False)
class TrainedCritic:
    """A rank's share of the critic, and of what moves it."""

    model: Critic
    optimizer: Optimizer
    settings: CriticConfig
    _updates: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))
    """AdamW's step count as a checkpoint keeps it."""

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps, to be loaded in place; `loaded` takes up what was."""
        self._updates.fill_(self.optimizer.updates)
        model = {f"critic/model/{name}": tensor for name, tensor in checkpoint_tensors(self.model).items()}
        return model | {f"critic/{name}": moment for name, moment in self.optimizer.moments().items()} | {"critic/updates": self._updates}

    def loaded(self) -> None:
        """The tensors are those of a checkpoint."""
        self.optimizer.updates = int(self._updates)


def load_critic(folder: Path, ranks: Ranks, *, settings: CriticConfig, trainer: TrainerConfig) -> TrainedCritic:
    """The critic that a run starts with: the model the policy starts from, a head of zeros, no moments. Every rank calls it.

    Of the trainer's settings those that name parameters are left out: they speak of the policy's.
    """
    critic = Critic(load_policy(folder).lm.base_model)
    make_ready(critic, ranks, trainer)
    own = trainer.model_copy(update={"learning_rate": settings.learning_rate, "max_grad_norm": settings.max_grad_norm,
                                     "learning_rate_groups": (), "frozen": ()})
    return TrainedCritic(critic, Optimizer(critic.named_parameters(), config=own, ranks=ranks), settings)
