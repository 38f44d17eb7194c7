"""What is computed again, or compiled, changes no gradient, and what is kept shrinks."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import cpp_builder
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asyncrl.errors import ConfigError
from asyncrl.train.batch import pack
from asyncrl.train.layers import checkpoint_activations, compile_layers, layers_of, require_compiler
from asyncrl.train.microbatch import build
from asyncrl.train.model import ForwardInputs, Policy, load_policy
from tests.devices import DEVICES
from tests.tiny_model import make_tiny_model
from tests.train.families import make_family
from tests.train.test_policy import whole_of
from tests.train.train_data import random_batch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "deep", layers=4)


def policy_of(folder: Path, how: str, device: str) -> Policy:
    policy = load_policy(folder).to(device)
    checkpoint_activations(layers_of(policy.lm), how)
    return policy


def gradient(policy: Policy, device: str, *, seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    packed = pack(random_batch(seed))
    inputs = ForwardInputs.of(build(whole_of(packed), tuple(range(len(packed.temperatures)))), torch.device(device))
    policy.zero_grad()
    logprobs = policy(inputs)[0]
    (logprobs * torch.linspace(-1, 1, len(logprobs), device=device)).sum().backward()
    return logprobs.detach(), {name: parameter.grad.clone() for name, parameter in policy.named_parameters() if parameter.grad is not None}


class Made(TorchDispatchMode):
    """Watches the memory of every result of an operation; `alive_bytes` is what of it is still held."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def alive_bytes(self) -> int:
        gc.collect()
        return sum(size for reference, size in self._made.values() if not reference.expired())


def kept_bytes(policy: Policy) -> int:
    """What a forward leaves for the backward pass."""
    packed = pack(random_batch(0, groups=8, group_size=8))
    inputs = ForwardInputs.of(build(whole_of(packed), tuple(range(len(packed.temperatures)))), torch.device("cpu"))
    with Made() as made:
        logprobs = policy(inputs)[0]
        alive = made.alive_bytes()
    logprobs.sum().backward()
    return alive


def test_the_more_is_computed_again_the_less_is_kept(folder: Path) -> None:
    none, selective, full = (kept_bytes(policy_of(folder, how, "cpu")) for how in ("none", "selective", "full"))
    assert full < 0.3 * none
    assert full < selective < 0.8 * none


@pytest.mark.parametrize("how", ["selective", "full"])
@pytest.mark.parametrize("family", ["qwen3 tied", "mixtral", "gemma2, scores and logits capped"])
def test_what_is_computed_again_gives_the_same_bits(family: str, how: str, tmp_path: Path) -> None:
    folder = make_family(family, tmp_path)
    plain, again = policy_of(folder, "none", "cpu"), policy_of(folder, how, "cpu")
    (logprobs, gradients), (other_logprobs, others) = gradient(plain, "cpu"), gradient(again, "cpu")
    assert torch.equal(logprobs, other_logprobs)
    assert gradients.keys() == others.keys() == dict(plain.named_parameters()).keys()
    assert all(torch.equal(gradients[name], others[name]) for name in gradients)


def has_compiler() -> bool:
    try:
        require_compiler(torch.device("cpu"))
    except ConfigError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch about torch, while it imports its compiler
@pytest.mark.skipif(not has_compiler(), reason="torch.compile needs a C++ compiler on the CPU")
@pytest.mark.parametrize("how", ["none", "full"])
@pytest.mark.parametrize("device", DEVICES)
def test_compiled_layers_equal_eager_ones_at_any_number_of_tokens(device: str, how: str, folder: Path) -> None:
    torch._dynamo.reset()  # what other tests of this process compiled
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    plain, compiled = policy_of(folder, "none", device), load_policy(folder).to(device)
    compile_layers(layers_of(compiled.lm), torch.device(device))
    checkpoint_activations(layers_of(compiled.lm), how)
    tolerance = 1e-5 if device == "cpu" else 1e-4
    for seed in range(3):
        (logprobs, gradients), (others, other_gradients) = gradient(plain, device, seed=seed), gradient(compiled, device, seed=seed)
        torch.testing.assert_close(others, logprobs, rtol=0, atol=tolerance)
        largest = max(float(expected.abs().max()) for expected in gradients.values())
        for name, expected in gradients.items():
            torch.testing.assert_close(other_gradients[name], expected, rtol=0, atol=tolerance * largest)
    assert graphs["unique_graphs"] - before <= 8


def test_without_a_compiler_the_setting_is_refused_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise cpp_builder.exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    with pytest.raises(ConfigError, match=r"trainer\.compile = True.*C\+\+ compiler.*g\+\+"):
        compile_layers(layers_of(load_policy(folder).lm), torch.device("cpu"))
