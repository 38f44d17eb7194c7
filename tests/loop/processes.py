"""Watching processes in tests: who descends from whom, and whether all of them are gone."""

from __future__ import annotations

import time
from pathlib import Path


def descendants(pid: int) -> set[int]:
    """Every living process below `pid`."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            parents[int(stat.parent.name)] = int(fields[1])
    found: set[int] = set()
    fresh = {pid}
    while fresh := {child for child, parent in parents.items() if parent in fresh} - found:
        found |= fresh
    return found


def alive(pids: set[int]) -> set[int]:
    """Those that still run; a zombie does not."""
    states = {}
    for pid in pids:
        try:
            states[pid] = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
    return {pid for pid, state in states.items() if state != "Z"}


def gone_within(pids: set[int], seconds: float) -> bool:
    """Whether all have ended before the time is over."""
    deadline = time.monotonic() + seconds
    while alive(pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
