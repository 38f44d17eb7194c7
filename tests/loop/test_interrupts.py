"""`asyncrl train` told to end, or killed, and taken up again: as a process, with a real engine and a real rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from asyncrl.cli import EXIT_INTERRUPTED, EXIT_OK, EXIT_TERMINATED, EXIT_USAGE
from asyncrl.interrupts import _ONE_REQUEST_S
from asyncrl.run_state import load_state
from asyncrl.train.checkpoint_store import newest
from tests.loop.processes import alive, descendants, gone_within
from tests.tiny_model import make_tiny_model

ROOT = Path(__file__).parents[2]
TASK = ROOT / "tests" / "effects_task.py"
LIMIT_S = 90.0

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def write_recipe(model: Path, folder: Path) -> Path:
    recipe = {
        "model": {"kind": "folder", "path": str(model)}, "prompts": {"kind": "function", "function": f"{TASK}:questions"},
        "engine": {"kind": "transformers"}, "sampling": {"max_new_tokens": 6}, "env": {"kind": "single_turn", "reward": f"{TASK}:varied"},
        "buffer": {"groups_per_step": 4, "group_size": 4, "max_staleness": 2}, "advantages": "grpo", "correction": "token_tis",
        "loss": "decoupled_ppo", "trainer": {"learning_rate": 1e-4, "processes": 1, "checkpoint_every_steps": 2},
        "weights": {"dtype": "float32"}, "run": {"name": "told", "steps": 100_000, "folder": str(folder), "rollouts_every_steps": 1}}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


@contextmanager
def training(recipe: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The command as a process of its own; whatever happens it does not outlive the test."""
    command = [sys.executable, "-m", "asyncrl.cli", "train", str(recipe), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def rows(folder: Path) -> list[int]:
    """Steps that the metrics hold, in the order of the file; a line that is not finished has none."""
    path = folder / "told" / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("}")]


def wait_for_step(process: subprocess.Popen[str], folder: Path, step: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while max(rows(folder), default=0) < step:
        assert process.poll() is None, f"the run ended: {process.stderr.read() if process.stderr else ''}"
        assert time.monotonic() < deadline, "the run never got so far"
        time.sleep(0.02)


def shared_folders(pid: int) -> list[Path]:
    return list(Path("/dev/shm").glob(f"asyncrl-*-{pid}-*"))


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, EXIT_INTERRUPTED), (signal.SIGTERM, EXIT_TERMINATED)],
                         ids=["ctrl-c", "sigterm"])
def test_a_run_that_is_told_to_end_saves_and_goes_on_where_it_was(signum: signal.Signals, code: int, model: Path, tmp_path: Path) -> None:
    recipe = write_recipe(model, tmp_path)
    with training(recipe) as process:
        wait_for_step(process, tmp_path, 3)
        family = descendants(process.pid)
        process.send_signal(signum)
        _, said = process.communicate(timeout=LIMIT_S)
        assert process.returncode == code
        assert "a step under way is finished and saved" in said
        assert f"ended by {signum.name}" in said
        assert gone_within(family, 5.0)
        assert not shared_folders(process.pid)
    made = rows(tmp_path)
    assert made == list(range(1, len(made) + 1))
    checkpoint = newest(tmp_path / "told" / "checkpoints")
    assert checkpoint is not None
    assert load_state(checkpoint).index == len(made), "what was trained was saved"
    assert json.loads((tmp_path / "told" / "summary.json").read_text())["ended_early"] == "interrupted"

    with training(recipe, "--resume", f"run.steps={len(made) + 3}") as process:
        _, said = process.communicate(timeout=LIMIT_S)
        assert process.returncode == EXIT_OK, said
    assert rows(tmp_path) == list(range(1, len(made) + 4))
    summary = json.loads((tmp_path / "told" / "summary.json").read_text())
    assert (summary["steps"], summary["ledger_closed"]) == (len(made) + 3, True)
    assert "ended_early" not in summary
    assert "resume" in summary["tokens_dropped"]
    written = [json.loads(line)["step"] for line in (tmp_path / "told" / "rollouts.jsonl").read_text().splitlines()]
    assert sorted(set(written)) == list(range(1, len(made) + 4))
    assert all(written.count(step) == 4 for step in set(written)), "no group is written twice"


def test_a_second_signal_ends_a_run_at_once(model: Path, tmp_path: Path) -> None:
    """Its rank is stopped, so that the step under way never ends."""
    with training(write_recipe(model, tmp_path)) as process:
        wait_for_step(process, tmp_path, 2)
        family = descendants(process.pid)
        for pid in family:
            if "asyncrl.train.rank" in Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "):
                os.kill(pid, signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert any("a step under way is finished" in line for line in process.stderr), "the first one is heard"
        time.sleep(2 * _ONE_REQUEST_S)
        assert process.poll() is None, "and waits for the step"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20.0) == EXIT_INTERRUPTED, "long before the step is given up"
        assert gone_within(family, 5.0), alive(family)
        assert not shared_folders(process.pid)


def test_kills_at_any_moment_leave_a_run_that_goes_on(model: Path, tmp_path: Path) -> None:
    recipe = write_recipe(model, tmp_path)
    for attempt in range(3):
        with training(recipe, "--resume=auto", "trainer.checkpoint_every_steps=1") as process:
            wait_for_step(process, tmp_path, max(rows(tmp_path), default=0) + 3)
            time.sleep(0.05 * attempt)
            process.kill()
            process.wait(timeout=LIMIT_S)
    last = max(rows(tmp_path))
    assert last >= 6, "each attempt went further than the one before"
    with training(recipe, "--resume", f"run.steps={last + 1}", "trainer.processes=2") as process:
        _, said = process.communicate(timeout=LIMIT_S)
        assert process.returncode == EXIT_OK, said
    assert rows(tmp_path) == list(range(1, last + 2)), "two ranks go on where one was killed"
    assert json.loads((tmp_path / "told" / "summary.json").read_text())["ledger_closed"] is True


def test_resuming_what_is_not_there_or_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    recipe = write_recipe(model, tmp_path)
    with training(recipe, "--resume") as process:
        _, said = process.communicate(timeout=LIMIT_S)
        assert (process.returncode, "at least one whole checkpoint" in said) == (EXIT_USAGE, True)
    with training(recipe, "run.steps=2") as process:
        process.communicate(timeout=LIMIT_S)
        assert process.returncode == EXIT_OK
    other = make_tiny_model(tmp_path / "other")
    with training(recipe, "--resume", f"model.path={other}") as process:
        _, said = process.communicate(timeout=LIMIT_S)
        assert (process.returncode, "what the run began with" in said) == (EXIT_USAGE, True)
