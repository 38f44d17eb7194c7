"""Writes one_parameter.json and one_parameter.md from a real run: `python docs/make_one_parameter.py [FOLDER]`, 12 seconds of one core."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from one_parameter.checks import checks
from one_parameter.page import render
from one_parameter.record import record
from one_parameter.trace import make_trace

HERE = Path(__file__).parent


def run() -> dict[str, Any]:
    """The trace of a new run, as its JSON reads."""
    with tempfile.TemporaryDirectory() as folder:
        return json.loads(json.dumps(make_trace(record(Path(folder)))))


def main(folder: str | Path = HERE) -> None:
    """Run, check, write to `folder`. Exits with what does not hold, writing nothing."""
    trace = run()
    broken = [check for check in checks(trace) if not check.holds]
    if broken:
        raise SystemExit("\n".join(f"step {check.step}: {check.claim}: {check.gap:g}, allowed {check.allowed:g}" for check in broken))
    (Path(folder) / "one_parameter.json").write_text(json.dumps(trace, indent=1) + "\n", encoding="utf-8")
    (Path(folder) / "one_parameter.md").write_text(render(trace), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
