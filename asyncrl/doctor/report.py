"""`asyncrl doctor [RECIPE]`: the findings as a table of at most 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from asyncrl.config import RunConfig, Wandb, load_config
from asyncrl.doctor.checks import Finding, examine
from asyncrl.doctor.machine import Needs
from asyncrl.doctor.probes import probe, refusal
from asyncrl.errors import ConfigError
from asyncrl.preflight import Sizes, needs_of

COLUMNS = 80
_STATUS_COLUMNS, _NAME_COLUMNS = 6, 15


def diagnose(recipe: str | None, settings: Sequence[str]) -> list[Finding]:
    """The findings on this machine, and on a recipe with its settings on it; a recipe that cannot be read is one of them."""
    if recipe is None:
        return examine(probe(runs=Path("runs")))
    try:
        config = load_config(recipe, settings)
    except (ConfigError, OSError) as error:
        unread = Needs(refused=str(error))
        return examine(probe(runs=Path("runs"), needs=lambda: unread))
    return examine(probe(runs=Path(config.run.folder), needs=lambda: _needs(config, refused=refusal(recipe, settings))))


def _needs(config: RunConfig, *, refused: str) -> Needs:
    try:
        sizes = needs_of(config)
    except (ConfigError, OSError):
        sizes = Sizes(0, 0, 0)  # the dry run has said why
    threads = getattr(config.engine, "threads", 0) + max(1, config.trainer.processes) * config.trainer.threads
    return Needs(engine=config.engine.kind, threads=threads, disk_bytes=sizes.disk_bytes, shared_bytes=sizes.shared_bytes,
                 memory_bytes=sizes.memory_bytes, wandb=isinstance(config.run.wandb, Wandb), refused=refused)


def table(findings: Sequence[Finding]) -> str:
    """A row each: status, name, what was found; the remedy below it."""
    return "\n".join(line for finding in findings for line in _rows(finding))


def _rows(finding: Finding) -> list[str]:
    indent = " " * (_STATUS_COLUMNS + _NAME_COLUMNS)
    width = COLUMNS - len(indent)
    head = f"{finding.status.upper() if finding.status != 'ok' else 'ok':<{_STATUS_COLUMNS}}{finding.name:<{_NAME_COLUMNS}}"
    found = textwrap.wrap(finding.found, width) or [""]
    remedy = textwrap.wrap(finding.remedy, width - 2)
    return [head + found[0], *(indent + line for line in found[1:]),
            *(indent + ("→ " if number == 0 else "  ") + line for number, line in enumerate(remedy))]
