"""Somebody removes what a run writes to, while it goes on: one message, no traceback, no wait without end."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from asyncrl import cli
from asyncrl.observe.jsonl import JsonlWriter
from asyncrl.process import last_lines
from tests.test_disk_full import ended_early, recipe


@pytest.mark.slow
@pytest.mark.parametrize("removed", ["full", "checkpoints and shared memory"])
def test_a_folder_that_is_removed_ends_the_run_with_its_name(removed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    write, made = JsonlWriter.write, []
    make = cli.train.__globals__["build"]

    def build(*given: Any, **named: Any) -> Any:
        made.append(make(*given, **named))
        return made[0]

    def remove(self: JsonlWriter, row: Mapping[str, Any]) -> None:
        write(self, row)
        if row.get("step") == 3:
            shutil.rmtree(tmp_path / "full" if removed == "full" else made[0].paths.shared)

    monkeypatch.setattr("asyncrl.training.build", build)
    monkeypatch.setattr(JsonlWriter, "write", remove)
    assert cli.main(["train", str(recipe(tmp_path)), "trainer.checkpoint_every_steps=1"]) == cli.EXIT_FAILED
    last = [line for line in capsys.readouterr().err.splitlines() if line.startswith("asyncrl: ")][-1]
    assert last.startswith(f"asyncrl: RunAborted: {tmp_path / 'full' if removed == 'full' else made[0].paths.shared} was removed")
    assert "was removed while the run went on" in ended_early(tmp_path)


def test_a_log_that_was_removed_is_said_to_be_away(tmp_path: Path) -> None:
    assert last_lines(tmp_path / "away.log") == f"{tmp_path / 'away.log'} cannot be read: No such file or directory"
