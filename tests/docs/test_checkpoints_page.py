"""The two snippets of docs/checkpoints.md do what the page says."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.run_state import load_state
from asyncrl.train.checkpoint_store import checkpoint_folder, newest
from tests.docs.pages import ROOT, block_with
from tests.loop.test_resume import make_run
from tests.loop.test_run import LIMIT_S, fake
from tests.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def shown(first_line: str, **given: Any) -> dict[str, Any]:
    """What the block defines."""
    names = dict(given)
    exec(block_with("checkpoints.md", first_line), names)
    return names


def test_a_script_that_is_told_to_stop_saves_and_goes_on(model: Path, tmp_path: Path) -> None:
    told: list[int] = []

    def tell(index: int, reward: float) -> None:
        """What the page prints; after the third step somebody wants the run to stop."""
        told.append(index)
        if index == 3:
            run.stop()

    train = shown("import asyncio\nimport signal", print=tell)["train"]
    run = make_run(model, tmp_path, [fake()], every_steps=None)
    asyncio.run(asyncio.wait_for(train(run, 100), LIMIT_S))
    state = load_state(newest(run.paths.checkpoints))
    assert told == [1, 2, 3]
    assert state.index == run.index == 3
    assert state.notes == {"began_with": "the instruct model"}
    resumed = make_run(model, tmp_path, [fake()], resume="newest")
    asyncio.run(asyncio.wait_for(train(resumed, 5), LIMIT_S))
    assert told == [1, 2, 3, 4, 5]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_is_read_without_the_library(model: Path, tmp_path: Path) -> None:
    async def saved() -> Path:
        async with make_run(model, tmp_path, [fake()]) as run:
            async for _ in run.steps(2):
                pass
            await run.save()
            await run.export(tmp_path / "exported")
            return checkpoint_folder(run.paths.checkpoints, 2)

    tensors = shown("import torch\n")["read"](str(asyncio.run(asyncio.wait_for(saved(), LIMIT_S))))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    held = {name.removeprefix("model/"): tensor for name, tensor in tensors.items() if name.startswith("model/")}
    assert set(held) == {name for name, _ in exported.named_parameters()}
    assert all(torch.equal(held[name], parameter) for name, parameter in exported.named_parameters())
    assert {name.split("/")[0] for name in tensors} == {"model", "exp_avg", "exp_avg_sq"}
    assert all(f"exp_avg/{name}" in tensors and f"exp_avg_sq/{name}" in tensors for name in held)


def test_the_files_of_a_checkpoint_are_those_on_the_page(model: Path, tmp_path: Path) -> None:
    async def saved() -> Path:
        async with make_run(model, tmp_path, [fake()]) as run:
            async for _ in run.steps(1):
                pass
            await run.save()
            return checkpoint_folder(run.paths.checkpoints, 1)

    page = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    named = set(re.findall(r"step-00000020/(\S+)", page))
    assert {path.name for path in asyncio.run(asyncio.wait_for(saved(), LIMIT_S)).iterdir()} == named
