"""State that goes to the memory of the host and comes back is the same bits, and what an operation needs meanwhile it has."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from asyncrl.paths import RunPaths
from asyncrl.train.residence import Residence
from asyncrl.train.trainer import Trainer
from tests.train.train_data import random_batch

CPU = torch.device("cpu")


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(8, 4)
        self.head = torch.nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.arange(3.0))


def test_everything_moves_in_place_and_each_byte_is_counted_once() -> None:
    module = Tied()
    weight = module.embed.weight
    weight.grad = torch.ones_like(weight)
    moments = [torch.rand(8, 4), torch.rand(8, 4)]
    before = [tensor.clone() for tensor in (weight, weight.grad, module.scale, *moments)]
    places = [tensor.data_ptr() for tensor in (weight, weight.grad, module.scale, *moments)]
    residence = Residence([module], lambda: moments, device=CPU)
    weight_bytes, scale_bytes = 8 * 4 * 4, 3 * 4
    assert residence.offload() == 4 * weight_bytes + scale_bytes
    assert residence.offload() == 0
    assert module.head.weight is module.embed.weight is weight
    after = (weight, weight.grad, module.scale, *moments)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert all(tensor.data_ptr() != place for tensor, place in zip(after, places, strict=True))
    assert residence.onload() == 4 * weight_bytes + scale_bytes
    assert residence.onload() == 0


def test_what_an_operation_needs_is_at_home_while_it_runs_and_goes_again() -> None:
    residence = Residence([Tied()], list, device=CPU)
    with residence.at_home():
        assert not residence.offloaded
    residence.offload()

    @residence.at_home()
    def fail() -> None:
        assert not residence.offloaded
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert residence.offloaded


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_moments_that_live_with_the_host_stay_there_and_the_device_is_left_empty() -> None:
    device = torch.device("cuda")
    module = Tied().to(device)
    moments = [torch.rand(8, 4, device=device), torch.rand(8, 4)]
    residence = Residence([module], lambda: moments, device=device)
    moved = 2 * 8 * 4 * 4 + 3 * 4
    assert residence.offload() == moved
    assert {tensor.device.type for tensor in (module.embed.weight, module.scale, *moments)} == {"cpu"}
    assert residence.onload() == moved
    assert [tensor.device.type for tensor in (module.embed.weight, module.scale, *moments)] == ["cuda", "cuda", "cuda", "cpu"]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [0, 2])
def test_ranks_that_leave_and_come_back_train_the_same_bits(tiny: Path, tmp_path: Path, processes: int) -> None:
    async def hashes(folder: Path, *, leaves: bool) -> list[int]:
        trainer = Trainer(tiny, correction="token_tis", learning_rate=1e-3, processes=processes)
        paths = RunPaths(root=folder / "run", shared=folder / "shared")
        paths.make()
        await trainer.start(paths)
        try:
            found = []
            for version in range(2):
                if leaves:
                    await trainer.onload()
                await trainer.step(random_batch(version, version=version))
                found.append((await trainer.publish()).state_hash)
                if leaves:
                    moved = await trainer.offload()
                    weights = sum(parameter.numel() for parameter in _parameters(tiny))
                    assert 12 * weights <= moved < 12 * weights + 4096
                    assert await trainer.offload() == 0
                    scored = await trainer.score([random_batch(9, version=0).rollouts[0].sequences[0]])
                    assert scored[0].any()
            if leaves:
                await trainer.save(folder / "saved")
                await trainer.export(folder / "exported")
                assert await trainer.offload() == 0
            return found
        finally:
            await trainer.close()

    async def main() -> None:
        stayed = await hashes(tmp_path / "stays", leaves=False)
        assert await hashes(tmp_path / "leaves", leaves=True) == stayed
        assert len(set(stayed)) == 2

    asyncio.run(main())


def _parameters(folder: Path) -> list[torch.nn.Parameter]:
    from asyncrl.causal_lm import load_causal_lm

    return list(load_causal_lm(folder, dtype=torch.float32).parameters())
