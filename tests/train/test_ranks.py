"""Ranks as children, on gloo. Each start of a rank imports torch and transformers, so few tests do much."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.channel import Request
from asyncrl.paths import RunPaths
from asyncrl.train import checkpoint_store
from asyncrl.train.checkpoint_store import SavedFile
from asyncrl.train.trainer import StepResult, Trainer
from asyncrl.types import Batch
from tests.train.forked_ranks import Job, run_jobs
from tests.train.test_step_correction import SEQUENCES
from tests.train.train_data import BETA1, batch_of, first_gradient, inline_rank, random_batch, rollout, sequence, step_on, unequal_batch

LIMIT_S = 120.0
NOTICED_S = 5.0


def with_ranks(model: Path, folder: Path, use: Callable[[Trainer], Awaitable[None]], *, processes: int, correction: object = "token_tis",
               **settings: object) -> None:
    async def main() -> None:
        paths = RunPaths(root=folder / "run", shared=folder / "shared")
        paths.make()
        trainer = Trainer(model, correction=correction, processes=processes, learning_rate=1e-2, max_grad_norm=1e9, **settings)
        async with asyncio.timeout(LIMIT_S):
            await trainer.start(paths)
            try:
                await use(trainer)
            finally:
                await trainer.close()

    asyncio.run(main())


def whole_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Flat tensors of a checkpoint, put together from all ranks' files: FSDP cuts along the first dimension, in order of the ranks."""
    pieces = [(name, tensor) for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()]
    return {name: torch.cat([tensor.view(-1) for other, tensor in pieces if other == name]) for name, _ in pieces}


async def killed_mid_step(trainer: Trainer, batch: Batch) -> StepResult:
    """Stop one rank, so that the step cannot end; kill it when the other has been sent the step. Neither is left in time."""
    ranks = trainer._ranks._children
    stopped = ranks[1]
    os.kill(stopped.pid, signal.SIGSTOP)
    step = asyncio.create_task(trainer.step(batch))
    for _ in range(10):
        await asyncio.sleep(0)
    os.kill(stopped.pid, signal.SIGKILL)
    async with asyncio.timeout(NOTICED_S):
        reasons = await asyncio.gather(*(rank.wait_exit() for rank in ranks))
    assert all("signal 9" in reason for reason in reasons)
    result = await step
    assert {rank.pid for rank in trainer._ranks._children}.isdisjoint(rank.pid for rank in ranks)
    return result


@pytest.mark.slow
def test_a_correction_over_sequences_is_the_same_on_two_ranks(tiny: Path, tmp_path: Path) -> None:
    """Weights, rejection, self-normalisation and denominators of the whole batch, whoever holds which sequence."""
    async def use(trainer: Trainer) -> None:
        await trainer.step(random_batch(0))
        await trainer.save(tmp_path / "two")

    with_ranks(tiny, tmp_path, use, processes=2, correction=SEQUENCES, loss="gspo", microbatch_tokens=40)
    two = whole_tensors(tmp_path / "two")
    one = first_gradient(inline_rank(tiny, tmp_path / "store", correction=SEQUENCES, loss="gspo"), random_batch(0))
    largest = max(float(gradient.abs().max()) for gradient in one.values())
    assert largest > 0
    for name, gradient in one.items():
        torch.testing.assert_close(two[f"exp_avg/{name}"] / (1 - BETA1), gradient.detach().view(-1), rtol=0, atol=1e-6 * largest)


@pytest.mark.slow
def test_both_ranks_run_as_many_forwards_whatever_their_groups_weigh(tiny: Path, tmp_path: Path) -> None:
    """A rank that ran one less would leave the other waiting in a gather of weights."""
    job = Job("unequal", str(tiny), ranks=2, batches="unequal", settings={"microbatch_tokens": 100})
    facts = run_jobs([job], tmp_path)["unequal"].facts
    forwards = [facts[rank]["forwards"] for rank in range(2)]
    assert [len(tokens) for tokens in forwards] == [3, 3]
    assert sorted(tokens for rank in forwards for tokens in rank) == [95] * 5 + [100]


@pytest.mark.slow
def test_two_ranks_equal_one_and_survive_the_death_of_either(tiny: Path, tmp_path: Path) -> None:
    async def use(trainer: Trainer) -> None:
        await trainer.save(tmp_path / "initial")
        await trainer.publish()
        await trainer.step(random_batch(0))
        await trainer.save(tmp_path / "first")
        await trainer.step(random_batch(1, version=1))
        await trainer.publish()
        scored = await trainer.score([sequence([2, 3], [4, 5])])
        await trainer.step(random_batch(2, version=2))
        undisturbed = await trainer.publish()

        await trainer.restore(tmp_path / "initial")
        await trainer.step(random_batch(0))
        await trainer.step(random_batch(1, version=1))
        published = await trainer.publish()
        result = await killed_mid_step(trainer, random_batch(2, version=2))
        assert result.version == 3
        metrics = result.metrics.result()
        assert (metrics["train/restarts/sum"], metrics["train/redone_steps/sum"]) == (1, 2)
        recovered = await trainer.publish()
        assert recovered.state_hash == undisturbed.state_hash
        assert (recovered.base, recovered.run_epoch) == (published.version, published.run_epoch)
        await trainer.save(tmp_path / "recovered")

        limited = await trainer.step(unequal_batch(3))
        assert limited.trained_tokens == 575
        one_sequence = await trainer.step(batch_of(rollout(0, 0, sequence([2], [3])), version=4))
        assert one_sequence.skipped
        assert (await trainer.score([sequence([2, 3], [4, 5])]))[0].shape == scored[0].shape
        await trainer.export(tmp_path / "export")

    with_ranks(tiny, tmp_path, use, processes=2, microbatch_tokens=100)
    logs = [path.read_text(encoding="utf-8") for path in (tmp_path / "run" / "logs").glob("trainer-*")]
    assert len(logs) >= 2
    assert all("attention: sdpa, no flash: flash needs a GPU" in log for log in logs)
    check_first_step_against_one_rank(tiny, tmp_path)
    check_one_rank_loads_what_two_saved(tiny, tmp_path)


def check_first_step_against_one_rank(model: Path, folder: Path) -> None:
    """Same batch, one rank in this process: gradients and weights after the update agree."""
    alone = inline_rank(model, folder / "store", microbatch_tokens=100)
    step_on(alone, random_batch(0))
    two = whole_tensors(folder / "first")
    for name, tensor in alone._tensors().items():
        if name.startswith("exp_avg/"):
            torch.testing.assert_close(two[name] / (1 - BETA1), tensor.detach().view(-1) / (1 - BETA1), rtol=0, atol=1e-5)
        if name.startswith("model/"):
            assert (two[name] - tensor.detach().view(-1)).abs().mean() < 1e-2 * 1e-2


def check_one_rank_loads_what_two_saved(model: Path, folder: Path) -> None:
    manifest = checkpoint_store.verified(folder / "recovered")
    assert (manifest.version, manifest.updates, len(manifest.files)) == (3, 3, 3)
    alone = inline_rank(model, folder / "store")
    alone.restore(Request("restore", body={"folder": str(folder / "recovered"), "updates": 3}))
    two = whole_tensors(folder / "recovered")
    assert all(torch.equal(two[name], tensor.detach().view(-1)) for name, tensor in alone._tensors().items())
    reply = alone.save(Request("save", body={"folder": str(checkpoint_store.begin(folder / "alone"))}))
    saved = alone.saved(Request("saved", body={"wait": True}))
    files = [SavedFile(**file) for file in saved["files"]]
    checkpoint_store.commit(folder / "alone", files=files, version=3, updates=reply["updates"], run_epoch=0)
    one = whole_tensors(folder / "alone")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.slow
def test_adapters_on_two_ranks_are_those_of_one(tiny: Path, tmp_path: Path) -> None:
    """Gradients, publications, recovery of a killed rank, and the merged export; a new rank has the frozen model from its folder."""
    lora = {"kind": "lora", "rank": 3}
    published: dict[int, list[int]] = {}

    def use(processes: int) -> Callable[[Trainer], Awaitable[None]]:
        async def main(trainer: Trainer) -> None:
            hashes = [(await trainer.publish()).state_hash]
            for version in range(2):
                await trainer.step(random_batch(version, version=version))
                if version == 0:
                    await trainer.save(tmp_path / f"first-{processes}")
                hashes.append((await trainer.publish()).state_hash)
            if processes == 2:
                os.kill(trainer._ranks._children[1].pid, signal.SIGKILL)
                assert (await trainer.publish()).state_hash == hashes[-1]
            await trainer.save(tmp_path / f"saved-{processes}")
            await trainer.export(tmp_path / f"model-{processes}")
            published[processes] = hashes
        return main

    for processes in (1, 2):
        with_ranks(tiny, tmp_path / str(processes), use(processes), processes=processes, lora=lora)
    assert published[1][0] == published[2][0]
    one, two = (whole_tensors(tmp_path / f"first-{processes}") for processes in (1, 2))
    assert set(one) == set(two)
    assert all(".lora_" in name for name in one)
    largest = max(float(tensor.abs().max()) for name, tensor in one.items() if name.startswith("exp_avg/"))
    assert largest > 0
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=1e-6 * (largest if name.startswith("exp_avg/") else 1))
    one, two = (load_file(tmp_path / f"model-{processes}" / "model.safetensors") for processes in (1, 2))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=1e-4)
    assert set(one) == set(load_file(tiny / "model.safetensors"))
