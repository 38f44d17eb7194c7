"""A run that fails or is interrupted leaves what it had: rows, summary, picture, and why it ended."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from asyncrl.buffer.replay_buffer import ReplayBuffer
from asyncrl.config import RunConfig, parse_config
from asyncrl.errors import LedgerError, RunAborted
from asyncrl.loop import Run
from asyncrl.observe.console import Console
from asyncrl.observe.plain import PlainFace
from asyncrl.run_state import load_state
from asyncrl.train.checkpoint_store import newest
from asyncrl.training import train
from tests.tiny_model import make_tiny_model

TASK = Path(__file__).with_name("effects_task.py")
LIMIT_S = 60


def config(tmp_path: Path, *, reward: str, steps: int = 1000) -> RunConfig:
    model = make_tiny_model(tmp_path / "model")
    return parse_config({
        "model": {"kind": "folder", "path": str(model)}, "prompts": {"kind": "function", "function": f"{TASK}:questions"},
        "engine": {"kind": "inline"}, "sampling": {"max_new_tokens": 4}, "env": {"kind": "single_turn", "reward": f"{TASK}:{reward}"},
        "buffer": {"groups_per_step": 2, "group_size": 4, "max_staleness": 1}, "advantages": "grpo", "correction": "token_tis",
        "loss": "decoupled_ppo", "trainer": {"learning_rate": 1e-3, "processes": 0},
        "run": {"name": "early", "steps": steps, "folder": str(tmp_path)}}, base=tmp_path)


async def trained(config: RunConfig, *, row: Callable[[Mapping[str, object]], None] = lambda row: None) -> None:
    """Train with a console that says nothing; `row` is called with each row it is told."""
    class Told(Console):
        def row(self, told: Mapping[str, object]) -> None:
            row(told)
            super().row(told)

    console = Told(PlainFace(lambda line: None))
    try:
        await asyncio.wait_for(train(config, console=console), LIMIT_S)
    finally:
        console.close()
    assert console.lost == 0


def summary_of(tmp_path: Path) -> dict[str, object]:
    folder = tmp_path / "early"
    assert (folder / "reward.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def test_a_run_that_fails_says_why_cause_first(tmp_path: Path) -> None:
    with pytest.raises(RunAborted, match=r"reward_error: RewardError: .*ZeroDivisionError|ZeroDivisionError: a line of the reward"):
        asyncio.run(trained(config(tmp_path, reward="broken")))
    summary = summary_of(tmp_path)
    assert summary["steps"] == 0
    assert str(summary["ended_early"]).startswith("RunAborted: ")
    assert "a line of the reward" in str(summary["ended_early"])


def test_a_run_whose_rollouts_fail_saves_what_it_had_trained(tmp_path: Path) -> None:
    """Its trainer is well: no step need be made again once the reward is mended."""
    with pytest.raises(RunAborted, match="ZeroDivisionError"):
        asyncio.run(trained(config(tmp_path, reward="broken_after_a_while")))
    summary = summary_of(tmp_path)
    assert summary["steps"] > 0
    checkpoint = newest(tmp_path / "early" / "checkpoints")
    assert checkpoint is not None
    state = load_state(checkpoint)
    assert (state.index, state.account.is_closed) == (summary["steps"], True)


def test_a_run_whose_ledger_does_not_close_saves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would not close after a resume either."""
    measured = Run._measure

    def lost(run: Run, *args: object, **settings: object) -> dict[str, float]:
        run.ledger.dropped("lost", tokens=4, rollouts=1)
        return measured(run, *args, **settings)

    monkeypatch.setattr(Run, "_measure", lost)
    with pytest.raises(LedgerError, match="does not close") as failure:
        asyncio.run(trained(config(tmp_path, reward="varied")))
    assert any("LedgerError" in note for note in failure.value.__notes__)
    assert newest(tmp_path / "early" / "checkpoints") is None


def test_a_run_that_is_interrupted_keeps_its_steps_and_closes_its_ledger(tmp_path: Path) -> None:
    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None

        def row(told: Mapping[str, object]) -> None:
            if told.get("step") == 3:
                task.cancel()

        await trained(config(tmp_path, reward="varied"), row=row)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    summary = summary_of(tmp_path)
    assert summary["steps"] in (3, 4), "the step under way is finished"
    checkpoint = newest(tmp_path / "early" / "checkpoints")
    assert checkpoint is not None
    assert load_state(checkpoint).index == summary["steps"]
    assert summary["ended_early"] == "interrupted"
    assert summary["ledger_closed"] is True
    assert summary["rollout_tokens"] == summary["trained_tokens"] + sum(summary["tokens_dropped"].values())


def test_a_rollout_counted_twice_at_the_end_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReplayBuffer, "drop_all", lambda self, reason: self.ledger.dropped(reason, tokens=4, rollouts=1))
    with pytest.raises(LedgerError, match="does not close"):
        asyncio.run(trained(config(tmp_path, reward="varied", steps=2)))
    summary = summary_of(tmp_path)
    assert summary["ledger_closed"] is False
    assert str(summary["ended_early"]).startswith("LedgerError: ")
