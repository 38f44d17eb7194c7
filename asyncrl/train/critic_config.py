"""The section `advantages.critic`: how the values that GAE needs are learnt. Needs no torch."""

from __future__ import annotations

from pydantic import Field

from asyncrl.settings import Section
from asyncrl.train.optimizer_config import LearningRate


class CriticConfig(Section):
    """A model of its own, begun as the policy's with a head of zeros: a value for each token. AdamW, schedule and minibatches are the
    trainer's, moments and these settings its own; all its parameters train, and none is published."""

    learning_rate: LearningRate = 1e-5
    """At the highest of `trainer.schedule`; ten times a policy's as a rule, 1e-5 in verl."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """A gradient longer than this, over all parameters of the critic, is scaled down to it."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """A value is not drawn further than this from the one it had before the step, in units of reward: 0.2 in TRL, 0.5 in verl. None: no
    such bound."""
    epochs: int = Field(default=1, ge=1)
    """Passes over a batch, each of `trainer.minibatches_per_step` updates."""
    warm_up_steps: int = Field(default=0, ge=0)
    """In so many first steps of the run the critic alone is trained: advantages of a critic that knows nothing move no policy."""
