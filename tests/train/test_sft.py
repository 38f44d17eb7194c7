"""Supervised training: the loss is transformers' own, no split changes the gradient, a restored trainer goes on with the same bits."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.channel import Request
from asyncrl.errors import CheckpointError, ConfigError, RunAborted
from asyncrl.train.examples import Example, ExampleReader, PackedExamples
from asyncrl.train.sft import HeldOut, SFTStep, SFTTrainer
from asyncrl.train.trainer import Trainer
from tests.tiny_model import EOS, make_tiny_model
from tests.train.test_ranks import whole_tensors
from tests.train.train_data import BETA1, inline_rank

ROWS = [(f"{left}+{right}=", str(left + right)) for left in range(5) for right in range(7)]
SETTINGS = {"learning_rate": 1e-2, "processes": 0}


def run(trainer: SFTTrainer, folder: Path, use: Callable[[SFTTrainer], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(200.0):
            try:
                await trainer.start(folder)
                await use(trainer)
            finally:
                await trainer.close()

    asyncio.run(main())


def all_steps(trainer: SFTTrainer, folder: Path) -> list[SFTStep]:
    taken: list[SFTStep] = []

    async def use(trainer: SFTTrainer) -> None:
        taken.extend([step async for step in trainer.steps()])

    run(trainer, folder, use)
    return taken


def their_loss(model: Path, examples: list[Example]) -> float:
    """transformers' own, right-padded, labels of −100 where nothing is learned."""
    width = max(len(example.tokens) for example in examples)
    tokens, labels = torch.zeros(len(examples), width, dtype=torch.long), torch.full((len(examples), width), -100)
    for row, example in enumerate(examples):
        ids = torch.from_numpy(example.tokens).long()
        tokens[row, :len(ids)] = ids
        labels[row, :len(ids)] = torch.where(torch.from_numpy(example.loss_mask), ids, -100)
    mask = torch.arange(width)[None] < torch.tensor([len(example.tokens) for example in examples])[:, None]
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        return float(lm(tokens, attention_mask=mask.long(), labels=labels).loss)


@pytest.mark.parametrize("model", ["tiny", "untied"])
def test_the_loss_is_that_of_transformers(model: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(model)
    examples = list(ExampleReader(folder).read(ROWS, field="examples"))
    trainer = SFTTrainer(folder, examples, held_out=examples, batch_size=len(ROWS), **SETTINGS)
    found: list[HeldOut] = []

    async def use(trainer: SFTTrainer) -> None:
        found.append(await trainer.evaluate())

    run(trainer, tmp_path, use)
    (step,) = all_steps(SFTTrainer(folder, ROWS, batch_size=len(ROWS), **SETTINGS), tmp_path)
    expected = their_loss(folder, examples)
    assert step.loss == pytest.approx(expected, abs=1e-5)
    assert found[0].loss == pytest.approx(expected, abs=1e-5)
    assert step.tokens == found[0].tokens == sum(len(completion) + 1 for _, completion in ROWS)


def first_gradient(model: Path, folder: Path, **settings: object) -> dict[str, torch.Tensor]:
    rank = inline_rank(model, folder / "store", **settings)
    batch = PackedExamples.of(list(ExampleReader(model).read(ROWS, field="examples")))
    rank.fit(Request("fit", body={"version": 0}, arrays=batch.arrays()))
    return {name: moment / (1 - BETA1) for name, moment in rank._trainee.optimizer.moments().items() if name.startswith("exp_avg/")}


def test_the_gradient_is_that_of_transformers_whatever_the_split(tiny: Path, tmp_path: Path) -> None:
    examples = list(ExampleReader(tiny).read(ROWS, field="examples"))
    lm = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    count = sum(int(example.loss_mask.sum()) for example in examples)
    for example in examples:
        tokens = torch.from_numpy(example.tokens).long()
        logprobs = lm(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        (-logprobs[torch.from_numpy(example.loss_mask[1:])].sum() / count).backward()
    for budget in (4096, 40, 1):
        found = first_gradient(tiny, tmp_path, microbatch_tokens=budget)
        for name, parameter in lm.named_parameters():
            scale = float(parameter.grad.abs().max())
            torch.testing.assert_close(found[f"exp_avg/{name}"], parameter.grad, rtol=0, atol=2e-6 * max(1.0, scale))


@pytest.mark.slow
def test_two_ranks_give_the_gradient_of_one_and_go_on_where_they_were_saved(tiny: Path, tmp_path: Path) -> None:
    settings = {"batch_size": len(ROWS), "max_steps": 3, "epochs": 3, "learning_rate": 1e-2, "max_grad_norm": 1e9, "microbatch_tokens": 40}
    losses: dict[int, list[float]] = {1: [], 2: []}

    async def two(trainer: SFTTrainer) -> None:
        losses[2].append((await trainer.step()).loss)
        await trainer.save(tmp_path / "two")
        losses[2] += [step.loss async for step in trainer.steps()]
        await trainer.export(tmp_path / "model")

    async def one(trainer: SFTTrainer) -> None:
        losses[1].append((await trainer.step()).loss)
        await trainer.restore(tmp_path / "two")
        assert trainer.version == 1
        losses[1] += [step.loss async for step in trainer.steps()]

    run(SFTTrainer(tiny, ROWS, processes=2, **settings), tmp_path / "run", two)
    run(SFTTrainer(tiny, ROWS, processes=0, **settings), tmp_path / "run", one)
    assert losses[1] == pytest.approx(losses[2], abs=1e-5)
    assert losses[1][2] < losses[1][1] < losses[1][0]
    whole, alone = whole_tensors(tmp_path / "two"), first_gradient(tiny, tmp_path)
    largest = max(float(gradient.abs().max()) for gradient in alone.values())
    for name, gradient in alone.items():
        torch.testing.assert_close(whole[name] / (1 - BETA1), gradient.view(-1), rtol=0, atol=1e-6 * max(1.0, largest))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").config.vocab_size == 16
    assert (tmp_path / "run" / "logs" / "trainer-1.log").exists()


def test_the_loss_falls_on_sums_and_what_it_leaves_is_a_model_to_begin_with(tiny: Path, tmp_path: Path) -> None:
    trainer = SFTTrainer(tiny, ROWS, held_out=ROWS, batch_size=16, epochs=50, learning_rate=1e-2, processes=0,
                         schedule={"kind": "cosine", "total_steps": 110, "warm_up_steps": 5})
    seen: list[HeldOut] = []

    async def use(trainer: SFTTrainer) -> None:
        seen.append(await trainer.evaluate())
        rates = [step.learning_rate async for step in trainer.steps()]
        assert rates[0] == pytest.approx(1e-2 / 5)
        assert max(rates) == pytest.approx(1e-2)
        seen.append(await trainer.evaluate())
        await trainer.export(tmp_path / "model")

    run(trainer, tmp_path, use)
    before, after = seen
    assert trainer.version == trainer.total_steps == math.ceil(50 * len(ROWS) / 16)
    assert after.loss < 0.1 < 2.0 < before.loss
    assert before.accuracy < 0.1 < 0.8 < after.accuracy
    lm = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokens = next(ExampleReader(tiny).read([("3+4=", "7")], field="row")).tokens
    answered = lm.generate(torch.from_numpy(tokens[:4]).long()[None], max_new_tokens=4, do_sample=False)[0].tolist()
    assert answered == [*tokens.tolist()]
    assert Trainer(tmp_path / "model", learning_rate=1e-3).model == tmp_path / "model"


def test_every_example_is_trained_on_once_an_epoch_in_another_order() -> None:
    class Recorded(SFTTrainer):
        def __init__(self, rows: int, *, batch_size: int, seed: int) -> None:
            self._examples = list(range(rows))  # type: ignore[assignment]
            self._batch_size, self._epochs, self._seed = batch_size, 3, seed

    def batches(seed: int) -> list[list[int]]:
        trainer = Recorded(10, batch_size=4, seed=seed)
        return [trainer._batch(step) for step in range(8)]  # type: ignore[misc]

    flat = [row for batch in batches(0) for row in batch]
    assert [len(batch) for batch in batches(0)] == [4] * 7 + [2]
    epochs = [flat[:10], flat[10:20], flat[20:]]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert batches(0) == batches(0) != batches(1)


def test_a_restored_trainer_ends_with_the_same_bits(tiny: Path, tmp_path: Path) -> None:
    settings = {"batch_size": 8, "epochs": 2, "seed": 3, "schedule": {"kind": "linear", "total_steps": 9}, **SETTINGS}

    async def whole(trainer: SFTTrainer) -> None:
        async for step in trainer.steps():
            if step.index == 4:
                await trainer.save(tmp_path / "saved")
        await trainer.export(tmp_path / "whole")

    async def rest(trainer: SFTTrainer) -> None:
        await trainer.restore(tmp_path / "saved")
        assert [step.index async for step in trainer.steps()] == list(range(5, 10))
        await trainer.export(tmp_path / "rest")

    run(SFTTrainer(tiny, ROWS, **settings), tmp_path, whole)
    run(SFTTrainer(tiny, ROWS, **settings), tmp_path, rest)
    assert (tmp_path / "whole" / "model.safetensors").read_bytes() == (tmp_path / "rest" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(("named", "changed"), [
    ("batch_size", {"batch_size": 7}), ("seed", {"seed": 4}), ("examples", {}), ("", {"epochs": 3})])
def test_a_checkpoint_is_not_gone_on_from_with_other_batches(named: str, changed: dict[str, int], tiny: Path, tmp_path: Path) -> None:
    async def saved(trainer: SFTTrainer) -> None:
        await trainer.step()
        await trainer.save(tmp_path / "saved")

    async def again(trainer: SFTTrainer) -> None:
        if not named:
            return await trainer.restore(tmp_path / "saved")
        with pytest.raises(CheckpointError, match=f"was saved with {named} .*, here it is "):
            await trainer.restore(tmp_path / "saved")
        assert trainer.version == 0

    settings = {"batch_size": 8, "epochs": 2, "seed": 3, **SETTINGS}
    run(SFTTrainer(tiny, ROWS, **settings), tmp_path, saved)
    run(SFTTrainer(tiny, ROWS[::-1] if named == "examples" else ROWS, **settings | changed), tmp_path, again)


def test_a_restored_trainer_of_adapters_ends_with_the_same_bits(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="adapters are peft's")

    async def saved(trainer: SFTTrainer) -> None:
        await trainer.step()
        await trainer.save(tmp_path / "saved")
        losses.append([step.loss async for step in trainer.steps()])

    async def again(trainer: SFTTrainer) -> None:
        await trainer.restore(tmp_path / "saved")
        losses.append([step.loss async for step in trainer.steps()])

    losses: list[list[float]] = []
    for use in (saved, again):
        run(SFTTrainer(tiny, ROWS, batch_size=10, lora={"kind": "lora", "rank": 2}, **SETTINGS), tmp_path, use)
    assert losses[0] == losses[1] != []


def test_an_iterator_is_taken_as_it_comes_and_again_from_its_place(tiny: Path, tmp_path: Path) -> None:
    async def saved(trainer: SFTTrainer) -> None:
        await trainer.step()
        await trainer.save(tmp_path / "saved")
        losses.append((await trainer.step()).loss)
        with pytest.raises(ConfigError, match="enough for 3 steps"):
            [step async for step in trainer.steps()]

    async def again(trainer: SFTTrainer) -> None:
        await trainer.restore(tmp_path / "saved")
        losses.append((await trainer.step()).loss)

    losses: list[float] = []
    for use in (saved, again):
        run(SFTTrainer(tiny, iter(ROWS), batch_size=20, max_steps=3, **SETTINGS), tmp_path, use)
    assert losses[0] == losses[1]


def test_an_iterator_is_not_taken_back(tiny: Path, tmp_path: Path) -> None:
    async def use(trainer: SFTTrainer) -> None:
        await trainer.save(tmp_path / "saved")
        await trainer.step()
        moved = await trainer.evaluate()
        with pytest.raises(ConfigError, match="An iterator cannot go back"):
            await trainer.restore(tmp_path / "saved")
        assert await trainer.evaluate() == moved, "nothing was loaded"

    run(SFTTrainer(tiny, iter(ROWS), held_out=ROWS[:3], batch_size=20, max_steps=3, **SETTINGS), tmp_path, use)


def test_gradients_that_are_not_finite_change_nothing_and_end_it(tiny: Path, tmp_path: Path) -> None:
    async def use(trainer: SFTTrainer) -> None:
        with torch.no_grad():
            trainer._ranks._rank._lm.model.norm.weight[0] = torch.nan
        step = await trainer.step()
        assert (step.skipped, math.isnan(step.loss)) == ("nonfinite", True)
        with pytest.raises(RunAborted, match="max_nonfinite_steps = 2"):
            await trainer.step()

    run(SFTTrainer(tiny, ROWS, max_nonfinite_steps=2, **SETTINGS), tmp_path, use)


@pytest.mark.parametrize(("given", "field"), [
    ({"minibatches_per_step": 2}, "trainer.minibatches_per_step"), ({"learning_rate_scale": "ess"}, "trainer.learning_rate_scale"),
    ({"routing_replay": True}, "trainer.routing_replay"), ({"batch_size": 0}, "batch_size"), ({"max_steps": 0}, "max_steps"),
    ({"learning_rat": 1}, "trainer.learning_rat")])
def test_settings_that_cannot_work_are_refused(tiny: Path, given: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        SFTTrainer(tiny, ROWS, **SETTINGS | given)
    assert refused.value.field == field


def test_data_that_cannot_work_are_refused(tiny: Path, tmp_path: Path) -> None:
    for rows, field in (([], "examples"), (iter(ROWS), "max_steps"), (tmp_path / "none.jsonl", "examples")):
        with pytest.raises(ConfigError) as refused:
            SFTTrainer(tiny, rows, **SETTINGS)
        assert refused.value.field == field


def test_rows_come_from_a_file_too(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [json.dumps({"prompt": prompt, "completion": completion}) for prompt, completion in ROWS]
    file.write_text("\n".join(rows) + "\n", encoding="utf-8")
    of_file, of_list = (all_steps(SFTTrainer(tiny, rows, batch_size=16, **SETTINGS), tmp_path) for rows in (file, ROWS))
    assert [dataclasses.astuple(step) for step in of_file] == [dataclasses.astuple(step) for step in of_list]
    assert EOS == 1
    assert np.isfinite(of_list[-1].loss)


def test_frozen_and_grouped_parameters_are_the_optimizers(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    trainer = SFTTrainer(model, ROWS, batch_size=16, frozen=["layers"], **SETTINGS)

    async def use(trainer: SFTTrainer) -> None:
        await trainer.step()
        await trainer.export(tmp_path / "export")

    run(trainer, tmp_path, use)
    before, after = (dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters()) for folder in (model, tmp_path / "export"))
    assert {name for name in before if not torch.equal(before[name], after[name])} == {"model.embed_tokens.weight", "model.norm.weight"}


def test_adapters_learn_too_and_the_export_has_them_merged(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="adapters are peft's")
    trainer = SFTTrainer(tiny, ROWS, held_out=ROWS, batch_size=16, epochs=4, lora={"kind": "lora", "rank": 4, "export_adapters": True},
                         **SETTINGS | {"learning_rate": 3e-2})
    seen: list[HeldOut] = []

    async def use(trainer: SFTTrainer) -> None:
        seen.append(await trainer.evaluate())
        async for _ in trainer.steps():
            pass
        seen.append(await trainer.evaluate())
        await trainer.export(tmp_path / "export")

    run(trainer, tmp_path, use)
    assert seen[1].loss < 0.8 * seen[0].loss
    examples = list(ExampleReader(tiny).read(ROWS, field="examples"))
    assert their_loss(tmp_path / "export", examples) == pytest.approx(seen[1].loss, abs=1e-4)
    assert (tmp_path / "export" / "adapter" / "adapter_config.json").is_file()
