import math
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrl.train.logprobs import Head, Predictions, token_logprobs, token_objective

P, V, D = 64, 500, 8


def of_logits(logits: list[list[float]], *, targets: list[int], temperatures: list[float]) -> tuple[Tensor, Tensor]:
    head = Head(torch.eye(len(logits[0])), None)
    return token_logprobs(torch.tensor(logits), head=head, predictions=Predictions(torch.tensor(targets), torch.tensor(temperatures)))


def test_temperature_divides_logits_not_logprobs() -> None:
    logprobs, _ = of_logits([[2.0, 1.0, 0.0, -1.0]] * 2, targets=[0, 0], temperatures=[0.6, 1.0])
    assert logprobs.tolist() == pytest.approx([-0.2081, -0.4402], abs=1e-4)


def test_entropy_is_that_of_the_sampled_distribution() -> None:
    _, entropy = of_logits([[0.0, math.log(2.0)]], targets=[0], temperatures=[0.5])
    assert entropy.item() == pytest.approx(-(0.2 * math.log(0.2) + 0.8 * math.log(0.8)))


def test_logits_far_apart_leave_entropy_0_and_no_nan() -> None:
    logprobs, entropy = of_logits([[1e4, 0.0], [0.0, -1e4]], targets=[0, 1], temperatures=[1.0, 1.0])
    assert logprobs.tolist() == [0.0, -1e4]
    assert entropy.tolist() == [0.0, 0.0]


class LargestTensor(TorchDispatchMode):
    """Counts the elements of the largest result."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


class AliveAtOnce(TorchDispatchMode):
    """Counts the storages of at least `elements` elements that are alive after an operation, at most."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements, self.most = elements, 0
        self._tensors: dict[int, list[weakref.ref[Tensor]]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor) and tensor.numel() >= self.elements:
                self._tensors.setdefault(tensor.untyped_storage().data_ptr(), []).append(weakref.ref(tensor))
        self.most = max(self.most, sum(any(tensor() is not None for tensor in tensors) for tensors in self._tensors.values()))
        return result


class Case:
    """Random hidden states, their head and targets, with a loss that is no linear function of logprobs and entropy."""

    def __init__(self, *, bias: bool, softcap: float | None = None) -> None:
        torch.manual_seed(0)
        self.softcap = softcap
        self.layer = nn.Linear(D, V, bias=bias)
        self.hidden = torch.randn(P, D, requires_grad=True)
        self.predictions = Predictions(torch.randint(0, V, (P,)), torch.rand(P) + 0.5)
        self.slopes = torch.linspace(-1, 2, P)

    def loss(self, logprobs: Tensor, entropy: Tensor, rows: slice) -> Tensor:
        return (self.slopes[rows] * (0.1 * logprobs).exp() - 0.3 * entropy.square()).sum()

    def gradients(self, total: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(total, [self.hidden, *self.layer.parameters()]))

    def plain(self) -> list[Tensor]:
        """Values and gradients by autograd on whole logits, in float64."""
        hidden, weight, *bias = (x.double() for x in (self.hidden, *self.layer.parameters()))
        logits = hidden @ weight.t() + (bias[0] if bias else 0)
        logits = logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)
        everything = torch.log_softmax(logits / self.predictions.temperatures.double()[:, None], dim=-1)
        logprobs = everything.gather(1, self.predictions.targets[:, None])[:, 0]
        entropy = -(everything.exp() * everything).sum(dim=-1)
        return [logprobs, entropy, *self.gradients(self.loss(logprobs, entropy, slice(None)))]

    def head(self, chunk_logits: int) -> Head:
        return Head.of(self.layer, chunk_logits=chunk_logits, softcap=self.softcap)

    def recomputed(self, chunk_logits: int) -> list[Tensor]:
        logprobs, entropy = token_logprobs(self.hidden, head=self.head(chunk_logits), predictions=self.predictions)
        return [logprobs, entropy, *self.gradients(self.loss(logprobs, entropy, slice(None)))]

    def in_the_forward(self, chunk_logits: int) -> list[Tensor]:
        total, logprobs, entropy = token_objective(self.hidden, head=self.head(chunk_logits), predictions=self.predictions,
                                                   objective=self.loss)
        torch.testing.assert_close(total, self.loss(logprobs, entropy, slice(None)))
        assert not logprobs.requires_grad
        assert not entropy.requires_grad
        return [logprobs, entropy, *self.gradients(total)]


@pytest.mark.parametrize("softcap", [None, 0.8])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 10, 64, 1000])
@pytest.mark.parametrize("way", [Case.recomputed, Case.in_the_forward])
def test_values_and_gradients_are_those_of_whole_logits(way, rows: int, bias: bool, softcap: float | None) -> None:
    case = Case(bias=bias, softcap=softcap)
    for ours, plain in zip(way(case, rows * V), case.plain(), strict=True):
        torch.testing.assert_close(ours.double(), plain.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", [Case.recomputed, Case.in_the_forward])
def test_a_chunk_bounds_the_largest_tensor(way) -> None:
    case = Case(bias=False)
    with LargestTensor() as largest:
        way(case, 10 * V)
    assert largest.elements == 10 * V


@pytest.mark.parametrize("way", [Case.recomputed, Case.in_the_forward])
def test_two_tensors_of_a_chunk_are_alive_at_most(way) -> None:
    case = Case(bias=False)
    with AliveAtOnce(10 * V) as alive:
        way(case, 10 * V)
    assert alive.most == 2


def test_both_ways_and_a_pass_without_gradient_give_the_same_bits() -> None:
    case = Case(bias=True)
    with torch.no_grad():
        alone = token_logprobs(case.hidden, head=Head.of(case.layer, chunk_logits=7 * V), predictions=case.predictions)
    for way in (Case.recomputed, Case.in_the_forward):
        assert all(torch.equal(ours, other) for ours, other in zip(way(case, 7 * V), alone, strict=False))


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_what_is_frozen_gets_no_gradient(frozen: str) -> None:
    case = Case(bias=False)
    (case.hidden if frozen == "hidden" else case.layer.weight).requires_grad_(False)
    total, *_ = token_objective(case.hidden, head=Head.of(case.layer), predictions=case.predictions, objective=case.loss)
    total.backward()
    assert (case.hidden.grad is None) == (frozen == "hidden")
    assert (case.layer.weight.grad is None) == (frozen == "weight")


def test_half_precision_sums_the_weight_gradient_in_float32() -> None:
    case = Case(bias=False)
    case.layer.bfloat16()
    case.hidden = case.hidden.detach().bfloat16().requires_grad_()
    fine, coarse = case.in_the_forward(V), case.in_the_forward(1 << 20)
    plain = case.plain()
    for ours in (fine, coarse):
        assert ours[3].dtype == torch.bfloat16
        torch.testing.assert_close(ours[3].double(), plain[3].double(), rtol=0.05, atol=0.05)


def test_no_prediction_is_no_error_and_a_zero_gradient() -> None:
    case = Case(bias=False)
    none = Predictions(torch.zeros(0, dtype=torch.int64), torch.zeros(0))
    hidden = torch.zeros(0, D, requires_grad=True)
    logprobs, entropy = token_logprobs(hidden, head=Head.of(case.layer), predictions=none)
    (logprobs.sum() + entropy.sum()).backward()
    total, *_ = token_objective(hidden, head=Head.of(case.layer), predictions=none,
                                objective=lambda logprobs, entropy, rows: logprobs.sum())
    total.backward()
    assert total.item() == 0.0
    assert not case.layer.weight.grad.any()
