import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrl.train.logprobs import token_logprobs


class Logits(nn.Module):
    """A head whose logits are its input."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def of_logits(logits: list[list[float]], *, targets: list[int], temperatures: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    return token_logprobs(torch.tensor(logits), head=Logits(), targets=torch.tensor(targets), temperatures=torch.tensor(temperatures),
                          vocabulary=len(logits[0]))


def test_temperature_divides_logits_not_logprobs() -> None:
    logprobs, _ = of_logits([[2.0, 1.0, 0.0, -1.0]] * 2, targets=[0, 0], temperatures=[0.6, 1.0])
    assert logprobs.tolist() == pytest.approx([-0.2081, -0.4402], abs=1e-4)


def test_entropy_is_that_of_the_sampled_distribution() -> None:
    _, entropy = of_logits([[0.0, math.log(2.0)]], targets=[0], temperatures=[0.5])
    assert entropy.item() == pytest.approx(-(0.2 * math.log(0.2) + 0.8 * math.log(0.8)))


class LargestTensor(TorchDispatchMode):
    """Counts the elements of the largest result."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_chunks_give_the_same_values_and_gradients_and_bound_the_largest_tensor() -> None:
    torch.manual_seed(0)
    head = nn.Linear(8, 500, bias=False)
    targets, temperatures = torch.randint(0, 500, (64,)), torch.rand(64) + 0.5
    results = []
    for chunk_elements in (1 << 24, 10 * 500):
        hidden = torch.linspace(-1, 1, 64 * 8).view(64, 8).requires_grad_()
        head.zero_grad()
        with LargestTensor() as largest:
            logprobs, entropy = token_logprobs(hidden, head=head, targets=targets, temperatures=temperatures, vocabulary=500,
                                               chunk_elements=chunk_elements)
            (logprobs * torch.arange(64)).sum().backward()
        results.append((logprobs.detach(), entropy, hidden.grad, head.weight.grad.clone(), largest.elements))
    whole, chunked = results
    torch.testing.assert_close(whole[0], chunked[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(whole[1], chunked[1], rtol=0, atol=1e-5)
    torch.testing.assert_close(whole[2], chunked[2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(whole[3], chunked[3], rtol=1e-5, atol=1e-4)
    assert whole[4] == 64 * 500
    assert chunked[4] == 10 * 500


def test_no_prediction_is_no_error() -> None:
    logprobs, entropy = token_logprobs(torch.zeros(0, 4, requires_grad=True), head=Logits(), targets=torch.zeros(0, dtype=torch.int64),
                                       temperatures=torch.zeros(0), vocabulary=4)
    logprobs.sum().backward()
    assert len(logprobs) == len(entropy) == 0
