"""FLOP of a step: what has to be computed, however it is scheduled."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.plan.lengths import cv2
from asyncrl.plan.models import ModelShape
from asyncrl.plan.workload import Algorithm, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFlop:
    """FLOP of a step by job, without attention over the context (`attention_ratio`)."""

    decode: float
    prefill: float
    forward: float
    train: float
    """Of the policy, and of a critic with its own forward."""

    @property
    def total(self) -> float:
        """F."""
        return self.decode + self.prefill + self.forward + self.train


def step_flop(model: ModelShape, *, workload: Workload, algorithm: Algorithm) -> StepFlop:
    """FLOP of a step.

    A token's forward multiplies and adds every active parameter once: 2N. Backward is two forwards, so training is 6N a token and epoch.
    F = 2N·T_resp + 2N·(B·P + environment) + 2N·forwards·T_all + 6N·epochs·T_all (+ 8N·T_all of a critic: a forward and its training).
    """
    token = 2.0 * model.active_params
    read = workload.prompts * workload.prompt_tokens + workload.rollouts * workload.turns * workload.environment_tokens
    return StepFlop(decode=token * workload.response_tokens, prefill=token * read,
                    forward=token * algorithm.forwards * workload.all_tokens,
                    train=token * (3 * algorithm.epochs + 4 * algorithm.critic) * workload.all_tokens)


def attention_ratio(model: ModelShape, *, workload: Workload) -> float:
    """FLOP of attention over those of the parameters, which `step_flop` leaves out.

    A query at position t costs 4·width·t a layer (scores and mixture); averaged over a sequence of s tokens, t = s/2.
    Over sequences of different length the tokens' mean of s is E[s²]/E[s], so the ratio is layers·width·E[s²]/E[s] / N.
    """
    mean = workload.context_tokens + workload.lengths.mean_tokens
    mean_square = mean**2 + cv2(workload.lengths) * workload.lengths.mean_tokens**2
    width = model.attention_width or model.hidden
    return model.layers * width * mean_square / mean / model.active_params
