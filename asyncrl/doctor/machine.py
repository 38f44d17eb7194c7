"""What the doctor looks at, as one record of plain values, so that its judgement can be tried without the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Import:
    """What came of importing something in a process of its own."""

    error: str = ""
    """Its last line, or how the process ended; empty when it went well."""
    seconds: float = 0.0
    facts: Mapping[str, object] = field(default_factory=dict)
    """What the module said of itself."""


@dataclass(frozen=True, slots=True)
class Place:
    """A folder something is written to."""

    path: str
    free_bytes: int
    error: str = ""
    """Why it cannot be written; empty when it can."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a recipe asks of the machine. Sizes are 0 where its model is not there yet, all is where it cannot be read."""

    engine: str = ""
    threads: int = 0
    """Of engine and trainer together."""
    disk_bytes: int = 0
    shared_bytes: int = 0
    memory_bytes: int = 0
    wandb: bool = False
    refused: str = ""
    """What `asyncrl train --dry-run` said when it refused the recipe."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What was found. A field whose probe failed is None, and named in `problems`."""

    python: tuple[int, int, int] | None
    system: str | None
    death_signal_error: str | None
    """What the kernel answers when a process asks to be told of its parent's end; empty when it agrees."""
    versions: Mapping[str, str] | None
    """Of the packages that are installed."""
    imports: Mapping[str, Import] | None
    """Of those packages whose import says something."""
    machine_cores: int | None
    usable_cores: float | None
    threads_variable: str | None
    """OMP_NUM_THREADS, empty when it is not set."""
    memory_bytes: int | None
    shared: Place | None
    temporary: Place | None
    runs: Place | None
    gpus: tuple[str, ...] | None
    """What the driver lists."""
    loopback_error: str | None
    open_files: int | None
    """Most this process may open; -1 for any number."""
    processes: int | None
    """Most this user may run; -1 for any number."""
    wandb_mode: str | None
    """How a run's tracker would start: online, offline, disabled."""
    needs: Needs | None = None
    """None without a recipe."""
    problems: Mapping[str, str] = field(default_factory=dict)
    """Field → what its probe failed with."""
