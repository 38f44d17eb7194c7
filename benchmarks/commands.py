"""The two commands of the README on a fresh clone in an empty folder, set-up included. `python benchmarks/commands.py`

Writes results/commands.json: seconds of `make demo` and of `make test`, and what the tests' last line says.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

from machine import ROOT, commit, machine

RESULT = ROOT / "benchmarks" / "results" / "commands.json"
TIMEOUT_S = 2400


def timed(target: str, folder: Path) -> dict[str, object]:
    """Clone, run `make target` there, and give its seconds and last line."""
    clone = folder / target
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True, timeout=TIMEOUT_S)
    environment = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "PYTHONPATH", "VIRTUAL_ENV")}
    began_s = time.monotonic()
    done = subprocess.run(["make", target], cwd=clone, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    seconds = time.monotonic() - began_s
    if done.returncode:
        raise SystemExit(f"make {target} failed:\n{done.stdout[-4000:]}\n{done.stderr[-2000:]}")
    return {"command": f"make {target}", "wall_s": round(seconds, 1), "last_line": done.stdout.strip().splitlines()[-1]}


def main() -> None:
    """Run both and write the JSON."""
    at = commit()
    with tempfile.TemporaryDirectory() as folder:
        rows = [timed(target, Path(folder)) for target in ("demo", "test")]
    result = {"benchmark": "commands", "commit": at, "machine": machine(), "commands": rows}
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
