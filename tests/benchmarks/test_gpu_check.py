"""The check on a GPU says why it cannot run, and what failed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check


def test_without_a_device_it_says_so_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "results" / "gpu_check.json"
    assert gpu_check.main(["--out", str(out)]) == gpu_check.UNFIT
    assert "no CUDA device" in capsys.readouterr().out
    assert not out.parent.exists()


def test_an_old_torch_and_a_missing_package_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    assert any("2.9.1+cu128 is older than 2.11" in reason for reason in gpu_check.unfit())
    monkeypatch.setattr(gpu_check, "NEEDED", ("torch", "no_such_package"))
    assert gpu_check.unfit() == ["not importable: no_such_package"]


@pytest.mark.parametrize(("tests", "code"), [("passed", 0), ("failed", 1)])
def test_one_part_that_fails_fails_the_check(tests: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "unfit", list)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device")
    monkeypatch.setattr(gpu_check, "ran", lambda command, limit_s: {
        "exit_code": code if "pytest" in command else 0, "seconds": 1.0, "last_lines": [tests]})
    out = tmp_path / "gpu_check.json"
    assert gpu_check.main(["--out", str(out)]) == code
    assert json.loads(out.read_text(encoding="utf-8"))["tests"]["exit_code"] == code


def test_a_part_that_takes_too_long_has_failed() -> None:
    found = gpu_check.ran([sys.executable, "-c", "import time; time.sleep(60)"], limit_s=0.5)
    assert found["exit_code"] == -1
    assert "longer than 0.5 s" in found["last_lines"][-1]
