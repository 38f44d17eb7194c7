"""Limits of control groups, of both versions, from a made-up file tree."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from asyncrl.machine import memory_limit_bytes, usable_cores

GIB = 2**30
CORES = len(os.sched_getaffinity(0))


def tree(root: Path, *, cgroup: str, files: dict[str, str]) -> Path:
    """A root with 8 GiB and these control groups."""
    for name, text in {"proc/meminfo": "MemTotal:        8388608 kB\nMemFree: 1 kB\n", "proc/self/cgroup": cgroup, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(("cgroup", "files", "memory_bytes", "cores"), [
    ("0::/\n", {}, 8 * GIB, CORES),
    ("0::/a/b\n", {"sys/fs/cgroup/a/b/memory.max": "max\n", "sys/fs/cgroup/a/memory.max": f"{2 * GIB}\n",
                   "sys/fs/cgroup/a/b/cpu.max": "50000 100000\n", "sys/fs/cgroup/a/cpu.max": "max 100000\n"}, 2 * GIB, 0.5),
    ("0::/away\n", {"sys/fs/cgroup/memory.max": f"{GIB}\n"}, GIB, CORES),
    ("4:memory:/job\n2:cpu,cpuacct:/\n", {"sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{3 * GIB}\n",
                                          "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                                          "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "25000\n",
                                          "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, 3 * GIB, 0.25),
    ("2:cpu:/\n", {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, 8 * GIB, CORES)],
    ids=["none", "v2", "v2 in a container", "v1", "v1 without a limit"])
def test_the_least_of_what_applies_is_the_limit(cgroup: str, files: dict[str, str], memory_bytes: int, cores: float,
                                                 tmp_path: Path) -> None:
    root = tree(tmp_path, cgroup=cgroup, files=files)
    assert (memory_limit_bytes(root), usable_cores(root)) == (memory_bytes, cores)


def test_this_machine_has_some() -> None:
    assert memory_limit_bytes() > 2**20
    assert usable_cores() > 0
