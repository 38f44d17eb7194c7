import math

import pytest
import torch
from torch import nn

from asyncrl.errors import ConfigError
from asyncrl.train.config import validated
from asyncrl.train.optim import Optimizer
from asyncrl.train.parallel import Ranks

ALONE = Ranks(rank=0, world_size=1, device=torch.device("cpu"), mesh=None)


def optimizer_of(parameters: dict[str, nn.Parameter], **settings: object) -> Optimizer:
    return Optimizer(parameters, config=validated({"trainer": {"learning_rate": 0.1, **settings}}).trainer, ranks=ALONE)


def with_gradient(values: list[float], gradient: list[float]) -> nn.Parameter:
    parameter = nn.Parameter(torch.tensor(values))
    parameter.grad = torch.tensor(gradient)
    return parameter


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    parameter = with_gradient([1.0, 2.0], [bad, 1.0])
    optimizer = optimizer_of({"w": parameter})
    update = optimizer.update(version=0)
    assert update.skipped == "nonfinite"
    assert parameter.tolist() == [1.0, 2.0]
    assert all(not moment.any() for moment in optimizer.moments().values())
    assert optimizer.updates == 0
    assert parameter.grad is None


def test_a_zero_gradient_is_skipped_so_momentum_alone_never_moves() -> None:
    parameter = with_gradient([1.0], [1.0])
    optimizer = optimizer_of({"w": parameter})
    optimizer.update(version=0)
    moved = parameter.item()
    parameter.grad = torch.zeros(1)
    assert optimizer.update(version=1).skipped == "zero"
    assert parameter.item() == moved
    assert optimizer.updates == 1


def test_clipping_scales_the_whole_gradient_to_the_limit() -> None:
    parameters = {"a": with_gradient([0.0], [3.0]), "b": with_gradient([0.0], [4.0])}
    optimizer = optimizer_of(parameters, max_grad_norm=1.0)
    assert optimizer.update(version=0).grad_norm == pytest.approx(5.0)
    assert optimizer.moments()["exp_avg/a"].item() == pytest.approx(0.1 * 0.6)
    assert optimizer.moments()["exp_avg/b"].item() == pytest.approx(0.1 * 0.8)


def test_updates_of_rl_size_survive_in_float32_and_half_precision_is_refused() -> None:
    parameter = with_gradient([0.019], [1.0])
    optimizer = optimizer_of({"w": parameter}, learning_rate=3e-6)
    for version in range(1000):
        parameter.grad = torch.ones(1)
        optimizer.update(version=version)
    assert parameter.item() == pytest.approx(0.016, abs=1e-5)
    assert all(moment.dtype == torch.float32 for moment in optimizer.moments().values())
    with pytest.raises(ConfigError, match="float32 master"):
        optimizer_of({"w": nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))})


def test_weight_decay_is_for_matrices() -> None:
    matrix, vector = nn.Parameter(torch.ones(1, 1)), nn.Parameter(torch.ones(1))
    matrix.grad, vector.grad = torch.full((1, 1), 1.0), torch.ones(1)
    optimizer_of({"matrix": matrix, "vector": vector}, weight_decay=0.5).update(version=0)
    assert vector.item() - matrix.item() == pytest.approx(0.1 * 0.5)


def test_schedules_are_functions_of_the_version() -> None:
    def rates(schedule: object, versions: list[int]) -> list[float]:
        config = validated({"trainer": {"learning_rate": 1.0, "schedule": schedule}}).trainer
        return [config.learning_rate_at(version) for version in versions]

    assert rates("constant", [0, 9]) == [1.0, 1.0]
    assert rates({"kind": "constant", "warm_up_steps": 4}, [0, 1, 3, 4]) == [0.25, 0.5, 1.0, 1.0]
    assert rates({"kind": "linear", "total_steps": 10, "final_frac": 0.5}, [0, 5, 10, 20]) == pytest.approx([1.0, 0.75, 0.5, 0.5])
    half = (1 + math.cos(math.pi / 4)) / 2
    assert rates({"kind": "cosine", "total_steps": 10, "warm_up_steps": 2}, [0, 2, 4, 10]) == pytest.approx([0.5, 1.0, half, 0.0])
