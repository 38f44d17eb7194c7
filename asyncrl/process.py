"""What the kernel does for our processes: they die with their parent, and how each ended is known."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_KIB = 1024
_LAST_LINES = 20
_LAST_BYTES = 16384


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended; `str()` says it in words."""

    code: int
    """Exit code, or minus the signal that killed it."""
    peak_bytes: int
    """Largest resident memory the kernel reports."""
    asked: bool
    """Whether we sent the signal ourselves."""
    inherited_bytes: int = 0
    """The starting process's own peak: the kernel counts it as the peak of what it executes."""

    def __str__(self) -> str:
        bound = "at most " if self.peak_bytes <= self.inherited_bytes else ""
        peak = f"peak memory {bound}{self.peak_bytes / 1e6:.0f} MB"
        if self.code >= 0:
            return f"exit code {self.code}, {peak}"
        how = f"killed by signal {-self.code} ({signal_name(-self.code)})"
        cause = ", on request" if self.asked else ", probable out of memory" if self.code == -signal.SIGKILL else ""
        return f"{how}{cause}, {peak}"


def signal_name(signum: int) -> str:
    """`SIGKILL`; a real-time signal has a number alone."""
    names = {known.value: known.name for known in signal.Signals}
    return names.get(signum, f"signal {signum}")


def die_with_parent(parent_pid: int, *, signum: int = signal.SIGKILL) -> None:
    """Have the kernel kill this process, or send it `signum`, when its parent ends; exits at once if that has already happened."""
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent_pid:
        os._exit(1)


def refuses_death_signal() -> str:
    """Why the kernel does not tell children of their parent's end; empty where it does."""
    try:
        _prctl(_PR_SET_PDEATHSIG, 0)
    except (OSError, AttributeError) as error:
        return str(error)
    return ""


def adopt_orphans() -> None:
    """Have the kernel make this process the parent of every process below it whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def child_pids() -> set[int]:
    """Children of this process's main thread, ended ones included; empty where the kernel does not list them."""
    try:
        return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}
    except FileNotFoundError:
        return set()


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def require_main_thread() -> None:
    """Raise RuntimeError off the main thread: the kernel ties a child's life to the thread that started it."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("start child processes from the main thread: they are killed when the thread that started them ends")


def peak_memory_bytes() -> int:
    """Largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB


def resident_bytes() -> int:
    """Memory of this process that is in RAM now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def release_free_memory() -> None:
    """Give the kernel back what was freed and the C library keeps for later; nothing where it is not glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def reap(pid: int, *, asked: bool, inherited_bytes: int = 0) -> Exit:
    """Wait for an ended child and take its resource use."""
    _, status, usage = os.wait4(pid, 0)
    return Exit(code=os.waitstatus_to_exitcode(status), peak_bytes=usage.ru_maxrss * _KIB, asked=asked, inherited_bytes=inherited_bytes)


def last_lines(log: Path) -> str:
    """The end of a log file, at most 20 lines, headed by its path; why there is none, where it was removed."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _LAST_BYTES))
            read = file.read()
    except OSError as error:
        return f"{log} cannot be read: {error.strerror}"
    lines = read.decode("utf-8", errors="replace").splitlines()[-_LAST_LINES:]
    return "\n".join([f"last lines of {log}:", *lines]) if lines else f"{log} is empty"
