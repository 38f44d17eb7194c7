"""What a step works on, on one rank."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.train.config import TrainConfig
from asyncrl.train.critic import TrainedCritic
from asyncrl.train.model import Policy
from asyncrl.train.optim import Optimizer
from asyncrl.train.parallel import Ranks
from asyncrl.train.rate_scale import RateScale
from asyncrl.train.reference import Reference


@dataclass(frozen=True, slots=True, eq=False)
class Trainee:
    """The policy and what trains it; every rank has its share."""

    policy: Policy
    optimizer: Optimizer
    rate_scale: RateScale
    ranks: Ranks
    config: TrainConfig
    reference: Reference | None = None
    """None where nothing is held to it."""
    critic: TrainedCritic | None = None
    """None where advantages need no values."""
