"""The learning rate's share that stale data deserve, update by update: VCPO with a reference of the run's own."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from asyncrl.correction.ess_control import EssSums, learning_rate_scale
from asyncrl.metrics import Metrics
from asyncrl.train.model import ForwardInputs
from asyncrl.train.optimizer_config import EssScale, LearningRateScale
from asyncrl.train.parallel import Ranks


class RateScale:
    """What `trainer.learning_rate_scale` says of an update. Every rank makes the same calls and gets the same numbers."""

    def __init__(self, config: LearningRateScale, *, ranks: Ranks) -> None:
        self._config, self._ranks = config, ranks
        self._measured = torch.zeros(2, dtype=torch.float64)
        """Sum of the ESS shares the reference is made of, and their number."""
        self._factor = self._ess_frac = 1.0

    def of_update(self, logprobs: Tensor, *, inputs: Iterable[ForwardInputs], rollout_logprobs: Tensor) -> float:
        """The factor of an update, by the importance weights current / rollout of its sequences, products over their loss tokens.

        Both logprobs are [T], read where this rank's `inputs` predict. 1 where no number is finite: such a gradient changes nothing.
        """
        if not isinstance(self._config, EssScale):
            return 1.0
        sums = self._sums(torch.cat([_sequence_sums(logprobs - rollout_logprobs, each) for each in inputs]))
        if sums is None:
            return 1.0
        self._ess_frac = sums.ess_frac
        if self._config.reference is None and self._measured[1] < self._config.reference_updates:
            self._measured += torch.tensor([self._ess_frac, 1.0], dtype=torch.float64)
            self._factor = 1.0
        else:
            reference = self._config.reference or float(self._measured[0] / self._measured[1])
            self._factor = learning_rate_scale(sums, base_ess_frac=reference, rule=self._config.rule)
        return self._factor

    def metrics(self) -> Metrics:
        """Of the newest update; nothing where the learning rate is the schedule's."""
        metrics = Metrics()
        if isinstance(self._config, EssScale):
            metrics.last("train/learning_rate_scale/last", self._factor)
            metrics.last("train/sequence_ess/last", self._ess_frac)
        return metrics

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps, to be loaded in place."""
        return {"learning_rate_scale/measured": self._measured} if isinstance(self._config, EssScale) else {}

    def _sums(self, log_weights: Tensor) -> EssSums | None:
        """Over all ranks; None where a weight is not finite, or there is none. The largest is made 1, which leaves the ESS as it is."""
        finite = torch.isfinite(log_weights)
        largest = log_weights.new_tensor([float("-inf"), float(not finite.all())])
        largest[0] = torch.cat([largest[:1], log_weights[finite]]).max()
        highest, broken = self._ranks.max(largest).tolist()
        if broken or highest == float("-inf"):
            return None
        own = EssSums.of((log_weights - highest).exp())
        weight_sum, square_sum, count = self._ranks.sum(log_weights.new_tensor([own.weight_sum, own.square_sum, own.count])).tolist()
        return EssSums(weight_sum, square_sum, int(count))


def _sequence_sums(log_ratio: Tensor, inputs: ForwardInputs) -> Tensor:
    """[S] float64"""
    running = log_ratio[inputs.places].double().cumsum(0)
    return torch.cat([running.new_zeros(1), running])[inputs.cu_targets].diff()
