import math

import pytest
import torch
from torch import nn

from asyncrl.errors import ConfigError
from asyncrl.train import optim
from asyncrl.train.config import validated
from asyncrl.train.optim import Optimizer
from asyncrl.train.parallel import Ranks
from tests.devices import DEVICES

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


def test_updates_of_rl_size_survive_in_float32_and_vanish_in_half_precision() -> None:
    """Torch's own AdamW in bfloat16 beside ours in float32: 1000 steps of 3e-6. That is why half precision is refused."""
    parameter, half = (nn.Parameter(torch.tensor([0.019], dtype=dtype)) for dtype in (torch.float32, torch.bfloat16))
    optimizer = optimizer_of({"w": parameter}, learning_rate=3e-6)
    plain = torch.optim.AdamW([half], lr=3e-6, betas=(0.9, 0.95), weight_decay=0.0)
    for version in range(1000):
        parameter.grad, half.grad = torch.ones(1), torch.ones(1, dtype=torch.bfloat16)
        optimizer.update(version=version)
        plain.step()
    assert f"{half.item():.5f}" == "0.01904"
    assert half.item() == torch.tensor(0.019, dtype=torch.bfloat16).item()
    assert f"{parameter.item():.4f}" == "0.0160"
    assert all(moment.dtype == torch.float32 for moment in optimizer.moments().values())
    with pytest.raises(ConfigError, match=r"float32 master.*0\.01904 in bfloat16, and 0\.0160 in float32"):
        optimizer_of({"w": nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))})


def test_weight_decay_is_for_matrices() -> None:
    matrix, vector = nn.Parameter(torch.ones(1, 1)), nn.Parameter(torch.ones(1))
    matrix.grad, vector.grad = torch.full((1, 1), 1.0), torch.ones(1)
    optimizer_of({"matrix": matrix, "vector": vector}, weight_decay=0.5).update(version=0)
    assert vector.item() - matrix.item() == pytest.approx(0.1 * 0.5)


def three_steps(device: str = "cpu", **settings: object) -> tuple[dict[str, nn.Parameter], Optimizer]:
    """The same gradients for whatever settings: of a matrix, a vector, and a matrix too large to visit with another."""
    random = torch.Generator().manual_seed(0)
    shapes = {"a": (7, 5), "b": (9,), "c": (16, 16)}
    parameters = {name: nn.Parameter(torch.randn(shape, generator=random).to(device)) for name, shape in shapes.items()}
    ranks = Ranks(rank=0, world_size=1, device=torch.device(device), mesh=None)
    optimizer = Optimizer(parameters, config=validated({"trainer": {"learning_rate": 0.1, "weight_decay": 0.1, **settings}}).trainer,
                          ranks=ranks)
    for version in range(3):
        for parameter in parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=random).to(device)
        optimizer.update(version=version)
    return parameters, optimizer


@pytest.mark.parametrize("device", DEVICES)
def test_offloaded_moments_visit_the_device_in_parts_and_give_the_same_bits(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim, "VISITING_BYTES", 512)
    expected, plain = three_steps(device)
    found, offloaded = three_steps(device, offload_optimizer=True)
    assert [[each.parameter.shape for each in share] for share in offloaded._shares(list(offloaded._trained.values()))] == [
        [(9,)], [(7, 5)], [(16, 16)]]
    assert all(torch.equal(found[name], parameter) for name, parameter in expected.items())
    assert all(torch.equal(offloaded.moments()[name], moment.cpu()) for name, moment in plain.moments().items())
    assert all(moment.is_pinned() == (device == "cuda") for moment in offloaded.moments().values())
    assert all(moment.abs().min() > 0 for moment in plain.moments().values())


def test_the_kernels_agree_to_rounding_with_one_another_and_with_torch() -> None:
    fused, foreach, auto = (three_steps(adamw=adamw)[0] for adamw in ("fused", "foreach", "auto"))
    assert all(torch.equal(fused[name], auto[name]) for name in fused)
    for name in fused:
        torch.testing.assert_close(fused[name], foreach[name], rtol=0, atol=1e-6)
    random = torch.Generator().manual_seed(0)
    theirs = [nn.Parameter(torch.randn(shape, generator=random)) for shape in ((7, 5), (9,), (16, 16))]
    groups = [{"params": [p for p in theirs if p.ndim > 1], "weight_decay": 0.1}, {"params": [theirs[1]], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95), fused=True)
    for _ in range(3):
        for parameter in theirs:
            parameter.grad = torch.randn(parameter.shape, generator=random)
        norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in theirs))
        for parameter in theirs:
            parameter.grad *= min(1.0, 1.0 / norm)
        adamw.step()
    for ours, other in zip(fused.values(), theirs, strict=True):
        torch.testing.assert_close(ours, other, rtol=0, atol=1e-6)


def test_groups_have_a_share_of_the_learning_rate_and_a_decay_of_their_own() -> None:
    parameters = {name: with_gradient([1.0], [1.0]) for name in ("embed", "layers.0.up", "layers.0.down", "norm")}
    optimizer_of(parameters, learning_rate_groups=[{"match": "^embed$", "factor": 0.1}, {"match": r"layers\.0", "factor": 2.0},
                                                   {"match": "norm", "factor": 1.0, "weight_decay": 0.5}]).update(version=0)
    moved = {name: 1.0 - parameter.item() for name, parameter in parameters.items()}
    assert moved == pytest.approx({"embed": 0.01, "layers.0.up": 0.2, "layers.0.down": 0.2, "norm": 0.1 + 0.1 * 0.5}, rel=1e-5)


@pytest.mark.parametrize(("patterns", "field"), [(["embed", "head"], "trainer.learning_rate_groups.1.match"),
                                                 (["embed", "^emb"], "trainer.learning_rate_groups.1.match"),
                                                 (["("], "trainer.learning_rate_groups.0.match")])
def test_a_group_that_decides_over_nothing_is_refused_by_its_pattern(patterns: list[str], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        optimizer_of({"embed": nn.Parameter(torch.zeros(1))}, learning_rate_groups=[{"match": p, "factor": 0.5} for p in patterns])
    assert refused.value.field == field
    assert refused.value.value == patterns[-1]


def test_names_of_a_tied_weight_go_into_one_group() -> None:
    tied = nn.Parameter(torch.zeros(1))
    with pytest.raises(ConfigError, match="one group for embed and head: they are tied"):
        optimizer_of({"embed": tied, "head": tied}, learning_rate_groups=[{"match": "head", "factor": 0.5}])
    both = optimizer_of({"embed": tied, "head": tied}, learning_rate_groups=[{"match": "embed|head", "factor": 0.5}])
    assert set(both.moments()) == {"exp_avg/embed", "exp_avg_sq/embed"}


def test_what_needs_no_gradient_has_no_moments_and_no_part_in_the_norm() -> None:
    parameters = {"still": nn.Parameter(torch.ones(1), requires_grad=False), "moves": with_gradient([1.0], [3.0])}
    parameters["still"].grad = torch.full((1,), 4.0)
    optimizer = optimizer_of(parameters)
    assert optimizer.update(version=0).grad_norm == pytest.approx(3.0)
    assert set(optimizer.moments()) == {"exp_avg/moves", "exp_avg_sq/moves"}
    assert (parameters["still"].item(), optimizer.updates) == (1.0, 1)


def test_schedules_are_functions_of_the_version() -> None:
    def rates(schedule: object, versions: list[int]) -> list[float]:
        config = validated({"trainer": {"learning_rate": 1.0, "schedule": schedule}}).trainer
        return [config.learning_rate_at(version) for version in versions]

    assert rates("constant", [0, 9]) == [1.0, 1.0]
    assert rates({"kind": "constant", "warm_up_steps": 4}, [0, 1, 3, 4]) == [0.25, 0.5, 1.0, 1.0]
    assert rates({"kind": "linear", "total_steps": 10, "final_frac": 0.5}, [0, 5, 10, 20]) == pytest.approx([1.0, 0.75, 0.5, 0.5])
    half = (1 + math.cos(math.pi / 4)) / 2
    assert rates({"kind": "cosine", "total_steps": 10, "warm_up_steps": 2}, [0, 2, 4, 10]) == pytest.approx([0.5, 1.0, half, 0.0])
