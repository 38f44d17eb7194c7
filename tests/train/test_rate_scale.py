"""The learning rate by effective sample size: by hand, over ranks, and in a step."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from asyncrl.errors import ConfigError
from asyncrl.train.config import validated
from asyncrl.train.optimizer_config import LearningRateScale
from asyncrl.train.parallel import Ranks
from asyncrl.train.rate_scale import RateScale
from tests.train.train_data import inline_rank, random_batch, step_on, weights

ALONE = Ranks(rank=0, world_size=1, device=torch.device("cpu"), mesh=None)


def scale_of(config: object, ranks: Ranks = ALONE) -> RateScale:
    return RateScale(TypeAdapter(LearningRateScale).validate_python(config), ranks=ranks)


def inputs(*cu_targets: int, first: int = 0) -> SimpleNamespace:
    return SimpleNamespace(places=torch.arange(first, first + cu_targets[-1]), cu_targets=torch.tensor(cu_targets))


def log_weights(*weights: float) -> Tensor:
    return torch.tensor(weights).log()


ONE_EACH = inputs(0, 1, 2, 3, 4)
UNEQUAL = log_weights(0.2, 0.5, 1.0, 4.0)
SHARE = 5.7**2 / (0.04 + 0.25 + 1.0 + 16.0) / 4


@pytest.mark.parametrize(("config", "factor"), [
    ({"kind": "ess", "reference": 1.0}, math.sqrt(SHARE)), ({"kind": "ess", "reference": 1.0, "rule": "linear"}, SHARE),
    ({"kind": "ess", "reference": 0.6}, math.sqrt(SHARE / 0.6)), ({"kind": "ess", "reference": 0.1}, 1.0), ({"kind": "none"}, 1.0)])
def test_the_factor_is_the_papers(config: dict[str, object], factor: float) -> None:
    scale = scale_of(config)
    assert scale.of_update(UNEQUAL - 2.0, inputs=[ONE_EACH], rollout_logprobs=torch.full((4,), -2.0)) == pytest.approx(factor)
    shown = scale.metrics().result()
    if config["kind"] == "none":
        assert shown == {}
    else:
        assert shown == pytest.approx({"train/learning_rate_scale/last": factor, "train/sequence_ess/last": SHARE})


def test_the_weight_of_a_sequence_is_the_product_over_its_tokens_whatever_its_size() -> None:
    tokens = torch.tensor([900.0, math.log(2.0), 901.0])
    scale = scale_of({"kind": "ess", "reference": 1.0, "rule": "linear"})
    share = (2.0 + math.e) ** 2 / (4.0 + math.e**2) / 2
    assert scale.of_update(tokens, inputs=[inputs(0, 2, 3)], rollout_logprobs=torch.zeros(3)) == pytest.approx(share)
    assert scale.of_update(tokens, inputs=[inputs(0, 2), inputs(0, 1, first=2), inputs(0)],
                           rollout_logprobs=torch.zeros(3)) == pytest.approx(share)


def test_a_reference_that_is_not_given_is_the_mean_of_the_first_updates() -> None:
    scale = scale_of({"kind": "ess", "reference_updates": 2, "rule": "linear"})
    zeros = torch.zeros(4)
    assert scale.of_update(zeros, inputs=[ONE_EACH], rollout_logprobs=zeros) == 1.0
    assert scale.of_update(UNEQUAL, inputs=[ONE_EACH], rollout_logprobs=zeros) == 1.0
    assert scale.of_update(UNEQUAL, inputs=[ONE_EACH], rollout_logprobs=zeros) == pytest.approx(SHARE / ((1 + SHARE) / 2))
    (measured,) = scale.tensors().values()
    assert measured.tolist() == pytest.approx([1 + SHARE, 2.0])


def test_shares_of_two_ranks_give_what_one_has() -> None:
    """Each rank sees what the other sent; the largest weight lies on one of them."""
    shares = [inputs(0, 1), inputs(0, 1, 2, 3, first=1)]
    sent: list[Tensor] = []

    class Both:
        def __init__(self, other: list[Tensor]) -> None:
            self._other = other

        def max(self, tensor: Tensor) -> Tensor:
            sent.append(tensor.clone())
            return torch.maximum(tensor, self._other[0]) if self._other else tensor

        def sum(self, tensor: Tensor) -> Tensor:
            sent.append(tensor.clone())
            return tensor + self._other[1] if self._other else tensor

    def factor(share: SimpleNamespace, other: list[Tensor]) -> float:
        sent.clear()
        scale = scale_of({"kind": "ess", "reference": 1.0}, Both(other))  # type: ignore[arg-type]
        return scale.of_update(UNEQUAL, inputs=[share], rollout_logprobs=torch.zeros(4))

    highest = [torch.tensor([math.log(4.0), 0.0], dtype=torch.float64)]
    first = torch.tensor([0.05, 0.0025, 1.0], dtype=torch.float64)
    second = torch.tensor([5.5 / 4, 17.25 / 16, 3.0], dtype=torch.float64)
    assert factor(shares[0], [*highest, second]) == pytest.approx(math.sqrt(SHARE), rel=1e-6)
    assert factor(shares[1], [*highest, first]) == pytest.approx(math.sqrt(SHARE), rel=1e-6)


def test_logprobs_that_are_not_finite_leave_reference_and_rate() -> None:
    scale = scale_of({"kind": "ess"})
    assert scale.of_update(torch.tensor([0.0, math.nan, 0.0, 0.0]), inputs=[ONE_EACH], rollout_logprobs=torch.zeros(4)) == 1.0
    assert not scale.tensors()["learning_rate_scale/measured"].any()


def test_a_step_moves_the_weights_by_the_scaled_rate(tiny: Path, tmp_path: Path) -> None:
    """AdamW's first update is the learning rate, whatever the gradient: the share it moved by is the scale."""
    moved, shown = [], {}
    for scale in ("none", {"kind": "ess", "reference": 1.0}):
        rank = inline_rank(tiny, tmp_path / "store", learning_rate_scale=scale, learning_rate=1e-3)
        before = weights(rank)
        shown = step_on(rank, random_batch(0)).metrics.result()
        moved.append(sum(float((weight - before[name]).abs().sum()) for name, weight in weights(rank).items()))
    factor = shown["train/learning_rate_scale/last"]
    assert 0.1 < factor < 0.99
    assert moved[1] / moved[0] == pytest.approx(factor, rel=1e-3)
    assert shown["train/learning_rate/last"] == pytest.approx(1e-3)


def test_a_reference_that_is_given_is_not_measured() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.learning_rate_scale\.reference_updates, trainer\.learning_rate_scale\.reference"):
        validated({"trainer": {"learning_rate": 1.0, "learning_rate_scale": {"kind": "ess", "reference": 0.5, "reference_updates": 3}}})
