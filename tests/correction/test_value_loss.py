import math

import pytest
import torch

from asyncrl.correction.value_loss import value_loss
from asyncrl.errors import ConfigError, ShapeError


def of(values: list[float], old: list[float], returns: list[float], *, clip: float | None) -> tuple[list[float], list[bool], list[float]]:
    leaf = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    loss = value_loss(leaf, old_values=torch.tensor(old, dtype=torch.float64, requires_grad=True),
                      returns=torch.tensor(returns, dtype=torch.float64, requires_grad=True), clip=clip)
    loss.losses.sum().backward()
    return loss.losses.tolist(), loss.clipped.tolist(), leaf.grad.tolist()


def test_half_the_squared_error_without_a_clip() -> None:
    assert of([0.0, 2.0], [9.0, 9.0], [1.0, 1.0], clip=None) == ([0.5, 0.5], [False, False], [-1.0, 1.0])


def test_a_value_is_held_near_the_one_it_had_and_drawn_back_when_it_left_the_wrong_way() -> None:
    """Inside the clip; beyond it towards the return, held; beyond it away from the return, drawn back."""
    losses, clipped, gradient = of([0.1, 0.9, -0.5], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0], clip=0.2)
    assert losses == pytest.approx([0.405, 0.32, 1.125])
    assert clipped == [False, True, False]
    assert gradient == pytest.approx([-0.9, 0.0, -1.5])


def test_nothing_reaches_the_old_values_or_the_returns() -> None:
    old, returns = (torch.ones(1, requires_grad=True) for _ in range(2))
    value_loss(torch.zeros(1, requires_grad=True), old_values=old, returns=returns).losses.sum().backward()
    assert old.grad is None
    assert returns.grad is None


def test_a_value_that_is_not_finite_is_not_hidden_by_the_clip() -> None:
    for value in (math.nan, math.inf, -math.inf):
        losses, _, gradient = of([value], [0.0], [1.0], clip=0.2)
        assert not math.isfinite(losses[0])
        assert not math.isfinite(gradient[0])


@pytest.mark.parametrize("clip", [0.0, -1.0, math.inf, math.nan])
def test_a_clip_that_holds_nothing_or_everything_is_refused(clip: float) -> None:
    with pytest.raises(ConfigError, match=r"advantages\.critic\.value_clip"):
        value_loss(torch.zeros(1), old_values=torch.zeros(1), returns=torch.zeros(1), clip=clip)


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ShapeError, match="must be"):
        value_loss(torch.zeros(2), old_values=torch.zeros(1), returns=torch.zeros(2))
