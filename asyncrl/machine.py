"""What this process may use of the machine: the limits of its control groups count, not what the machine has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def memory_limit_bytes(root: Path = _ROOT) -> int:
    """Memory the kernel lets this process's control groups take together; all of the machine's without a limit."""
    total_kib = next(line.split()[1] for line in (root / "proc/meminfo").read_text().splitlines() if line.startswith("MemTotal:"))
    limits = (*_cgroup_files(root, "memory.max"), *_cgroup_files(root, "memory.limit_in_bytes", controller="memory"))
    return min([int(total_kib) * 1024, *(int(text) for text in limits if text.isdigit())])


def usable_cores(root: Path = _ROOT) -> float:
    """Cores this process may run on at once: those of its affinity, or less where a quota of CPU time is less."""
    quotas = [tuple(text.split()) for text in _cgroup_files(root, "cpu.max")]
    quotas += zip(_cgroup_files(root, "cpu.cfs_quota_us", controller="cpu"), _cgroup_files(root, "cpu.cfs_period_us", controller="cpu"),
                  strict=False)
    shares = [int(quota) / int(period) for quota, period in quotas if quota.isdigit()]
    return min([len(os.sched_getaffinity(0)), *shares])


def free_bytes(path: Path) -> int:
    """Room for a user on the file system of `path`, or of the nearest folder above it that exists."""
    stat = os.statvfs(existing_parent(path))
    return stat.f_bavail * stat.f_frsize


def existing_parent(path: Path) -> Path:
    """`path`, or the nearest of its parents that is there; what this user may not look at is not."""
    whole = path.absolute()
    return next(place for place in (whole, *whole.parents) if os.path.exists(place))


def _cgroup_files(root: Path, name: str, *, controller: str = "") -> Iterator[str]:
    """What the file says in each of this process's control groups, from its own to the root: version 2, or one controller of version 1."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller not in controllers.split(","):
            continue
        # In a container the path may be that of the host, which is not mounted: the group mounted at the top is its own then.
        mount = root / "sys/fs/cgroup" / controller
        own = mount / path.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(mount) and (folder / name).is_file():
                yield (folder / name).read_text().strip()
