"""A disk that fills while a run goes on: one message, what was whole stays whole, and nothing half is taken for it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from asyncrl import cli
from asyncrl.observe.jsonl import JsonlWriter
from asyncrl.train import checkpoint, export
from asyncrl.train.checkpoint_store import newest
from tests.tiny_model import make_tiny_model

ROOT = Path(__file__).parents[1]
TASK = Path(__file__).with_name("effects_task.py")
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def recipe(folder: Path) -> Path:
    """Six steps of a tiny model in this process, a checkpoint every two."""
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({
        "model": {"kind": "folder", "path": str(make_tiny_model(folder / "model"))},
        "prompts": {"kind": "function", "function": f"{TASK}:questions"}, "engine": {"kind": "inline"}, "sampling": {"max_new_tokens": 4},
        "env": {"kind": "single_turn", "reward": f"{TASK}:varied"}, "buffer": {"groups_per_step": 2, "group_size": 4, "max_staleness": 1},
        "advantages": "grpo", "correction": "token_tis", "loss": "decoupled_ppo",
        "trainer": {"learning_rate": 1e-3, "processes": 0, "checkpoint_every_steps": 2},
        "run": {"name": "full", "steps": 6, "folder": str(folder)}}), encoding="utf-8")
    return path


def ended_early(folder: Path) -> str:
    summary = json.loads((folder / "full" / "summary.json").read_text(encoding="utf-8"))
    assert summary["ledger_closed"]
    return summary["ended_early"]


def full_after(count: int, real):
    """`real`, until it has been called so often; then there is no space left."""
    calls = []

    def call(*given, **named):
        calls.append(given)
        if len(calls) > count:
            raise FULL
        return real(*given, **named)
    return call


@pytest.mark.slow
def test_metrics_without_room_end_the_run_with_a_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(JsonlWriter, "write", full_after(4, JsonlWriter.write))
    assert cli.main(["train", str(recipe(tmp_path))]) == cli.EXIT_FAILED
    assert capsys.readouterr().err.splitlines()[-1] == f"asyncrl: what the run writes has no place: {FULL}"
    assert ended_early(tmp_path) == f"OSError: {FULL}"


@pytest.mark.slow
def test_a_checkpoint_without_room_ends_the_run_and_the_one_before_it_stays_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                                      capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(checkpoint, "_save_alone", full_after(1, checkpoint._save_alone))
    assert cli.main(["train", str(recipe(tmp_path))]) == cli.EXIT_FAILED
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("asyncrl: CheckpointError: ")
    assert str(FULL) in error
    assert "CheckpointError" in ended_early(tmp_path)
    whole = newest(tmp_path / "full" / "checkpoints")
    assert whole is not None
    assert sorted(path.name for path in (tmp_path / "full" / "checkpoints").iterdir()) == [whole.name]


@pytest.mark.slow
def test_an_export_without_room_leaves_no_half_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                          capsys: pytest.CaptureFixture[str]) -> None:
    def half(tensors: object, file: Path, **_: object) -> None:
        file.write_bytes(b"half")
        raise FULL

    monkeypatch.setattr(export, "save_file", half)
    assert cli.main(["train", str(recipe(tmp_path))]) == cli.EXIT_FAILED
    assert str(FULL) in capsys.readouterr().err
    assert str(FULL) in ended_early(tmp_path)
    assert not (tmp_path / "full" / "model").exists()
    assert not list((tmp_path / "full").glob(".model*"))
    assert newest(tmp_path / "full" / "checkpoints") is not None


@pytest.mark.slow
def test_the_kernels_own_refusal_is_one_message_and_exit_code_1(tmp_path: Path) -> None:
    """No file of the process, or of one below it, may have more than 40 kB: less than the first checkpoint."""
    code = ("import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))\n"
            f"from asyncrl.cli import main; sys.exit(main(['train', {str(recipe(tmp_path))!r}]))")
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
                          timeout=120, check=False)
    assert done.returncode == cli.EXIT_FAILED, done.stderr
    assert os.strerror(errno.EFBIG) in done.stderr
    assert "Traceback" not in done.stderr
