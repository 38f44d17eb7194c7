"""Probes survive whatever they look at, and the command says so in a table with an exit code."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl import cli
from asyncrl.doctor import probes, report
from asyncrl.doctor.checks import Finding
from asyncrl.doctor.machine import Import
from tests.doctor.well_machine import NEEDS, WELL

QUICKSTART = Path(__file__).parents[2] / "recipes" / "arithmetic" / "quickstart.yaml"


@pytest.mark.parametrize(("code", "error"), [
    ("print('noise'); print('{\"a\": 1}')", ""), ("raise RuntimeError('operator torchvision::nms does not exist')",
                                                 "RuntimeError: operator torchvision::nms does not exist"),
    ("import ctypes; ctypes.string_at(0)", "killed by signal 11 (SIGSEGV)"), ("import os; os._exit(3)", "exit code 3"),
    ("while True: pass", "did not end within 1.5 s")])
def test_an_import_that_fails_crashes_or_hangs_is_told_from_outside(code: str, error: str) -> None:
    imported = probes.tried_import(code, timeout_s=1.5 if "while" in code else 60.0)
    assert imported.error == error
    assert imported.facts == ({} if error else {"a": 1})


def test_a_probe_that_raises_is_named_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def away() -> int:
        raise OSError("no /proc here")

    monkeypatch.setattr(probes, "memory_limit_bytes", away)
    monkeypatch.setattr(probes, "_imports", lambda: {"torch": Import()})
    machine = probes.probe(runs=Path("no/such/folder"))
    assert machine.problems == {"memory_bytes": "OSError: no /proc here"}
    assert machine.memory_bytes is None
    assert machine.python == sys.version_info[:3]
    assert machine.loopback_error == machine.death_signal_error == ""
    assert machine.usable_cores > 0
    assert machine.runs is not None
    assert machine.runs.error == ""


def test_the_driver_lists_gpus_and_its_failure_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert probes._gpus() == ()
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771 MiB, 570.1'\n")
    tool.chmod(0o755)
    assert probes._gpus() == ("NVIDIA H200, 143771 MiB, 570.1",)
    tool.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18\n")
    with pytest.raises(OSError, match="version mismatch"):
        probes._gpus()


def test_a_recipe_that_would_be_refused_is_told_in_its_own_words() -> None:
    assert probes.refusal(str(QUICKSTART), ["env.reward=task.py:rewrad"]).startswith("env.reward = ")


def test_the_table_has_80_columns_and_each_remedy_under_its_finding() -> None:
    long = Finding("shared memory", "warn", "64 MB " * 20, "Give the container more. " * 5)
    text = report.table([Finding("torch", "ok", "2.13.0"), long])
    lines = text.splitlines()
    assert max(map(len, lines)) <= report.COLUMNS
    assert lines[0] == "ok    torch          2.13.0"
    assert lines[1].startswith("WARN  shared memory  64 MB")
    assert any(line.startswith(" " * 21 + "→ Give the container") for line in lines)


@pytest.mark.parametrize(("machine", "code"), [({}, cli.EXIT_OK), ({"memory_bytes": 10**9}, cli.EXIT_OK),
                                               ({"python": (3, 9, 0)}, cli.EXIT_USAGE)])
def test_warnings_exit_0_and_a_failure_exits_2(machine: dict[str, object], code: int, monkeypatch: pytest.MonkeyPatch,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(report, "probe", lambda **given: dataclasses.replace(WELL, **machine))
    assert cli.main(["doctor"]) == code
    told = capsys.readouterr()
    assert told.err.startswith("asyncrl: looking")
    assert len(told.out.splitlines()) >= 17


def test_a_recipe_with_settings_is_looked_at_and_settings_alone_are_not(monkeypatch: pytest.MonkeyPatch,
                                                                        capsys: pytest.CaptureFixture[str]) -> None:
    seen = []
    monkeypatch.setattr(report, "refusal", lambda recipe, settings: seen.append(settings) or "")
    monkeypatch.setattr(probes, "_imports", lambda: {})

    def probe(**given: object) -> object:
        machine = probes.probe(**given)  # type: ignore[arg-type]
        assert machine.needs is not None
        assert (machine.needs.engine, machine.needs.wandb) == ("inline", False)
        return WELL

    monkeypatch.setattr(report, "probe", probe)
    assert cli.main(["doctor", str(QUICKSTART), "engine={kind: inline}"]) == cli.EXIT_OK
    assert seen == [["engine={kind: inline}"]]
    monkeypatch.setattr(report, "probe", lambda **given: dataclasses.replace(WELL, needs=given["needs"]()))
    capsys.readouterr()
    assert cli.main(["doctor", "no-such.yaml"]) == cli.EXIT_USAGE
    told = capsys.readouterr().out
    assert "ok    torch" in told
    assert "FAIL  recipe         recipe = 'no-such.yaml' is not allowed" in told
    with pytest.raises(SystemExit):
        cli.main(["doctor", "run.steps=3"])
    capsys.readouterr()


@pytest.mark.slow
def test_the_doctor_works_where_torch_is_broken(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libtorch_cpu.so: cannot open shared object file')\n")
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    done = subprocess.run([sys.executable, "-m", "asyncrl.cli", "doctor"], env=os.environ | {"PYTHONPATH": path}, capture_output=True,
                          text=True, timeout=250, check=False)
    assert done.returncode == cli.EXIT_USAGE
    assert "libtorch_cpu.so: cannot open shared object file" in " ".join(done.stdout.split())
    assert "FAIL  torch" in done.stdout
    assert "ok    loopback" in done.stdout


def test_what_a_recipe_needs_is_part_of_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_imports", lambda: {})
    assert probes.probe(runs=Path("runs"), needs=lambda: NEEDS).needs is NEEDS
