"""What only a GPU can show, in one go: `make gpu-check`, or `PYTHONPATH=. python -m benchmarks.gpu_check` without installing anything.

Needs Python 3.11 or 3.12, torch from 2.11 on with a CUDA device, transformers, pytest, and no network; vLLM and flash-attn may be missing.
Runs the tests marked `gpu`, then the benchmark's sections for a GPU, and writes results/trainer/gpu_check.json. Exit codes: 0 all passed,
1 something failed, 2 the machine is not fit, and then nothing is written.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT, commit, machine

RESULT = ROOT / "benchmarks" / "results" / "trainer" / "gpu_check.json"
LEAST_PYTHON, LEAST_TORCH = (3, 11), (2, 11)
NEEDED = ("torch", "transformers", "safetensors", "pydantic", "msgpack", "xxhash", "numpy", "pytest", "hypothesis")
TESTS_LIMIT_S, BENCHMARK_LIMIT_S = 240, 200
UNFIT = 2


def unfit() -> list[str]:
    """Why nothing can be checked here; empty where it can."""
    is_old = sys.version_info < LEAST_PYTHON
    reasons = [f"Python {sys.version.split()[0]} is older than {'.'.join(map(str, LEAST_PYTHON))}"] if is_old else []
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return [*reasons, f"not importable: {', '.join(missing)}"]
    import torch

    found = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
    if found < LEAST_TORCH:
        reasons.append(f"torch {torch.__version__} is older than {'.'.join(map(str, LEAST_TORCH))}")
    if not torch.cuda.is_available():
        reasons.append("torch sees no CUDA device")
    return reasons


def ran(command: list[str], *, limit_s: float) -> dict[str, Any]:
    """A command in the root of the checkout, which need not be installed; its exit code, seconds and last lines."""
    began_s = time.monotonic()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit_s, check=False)
        code, output = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as late:
        code, output = -1, f"{late.stdout or ''}\nlonger than {limit_s:g} s"
    return {"exit_code": code, "seconds": round(time.monotonic() - began_s, 1), "last_lines": output.splitlines()[-15:]}


def main(arguments: list[str] | None = None) -> int:
    """Check, print, write. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    reasons = unfit()
    if reasons:
        print("nothing was checked:", "; ".join(reasons))
        return UNFIT
    import torch

    parts = {"tests": ran([sys.executable, "-m", "pytest", "-m", "gpu", "tests", "-q", "-p", "no:cacheprovider", "-W",
                            "ignore::pytest.PytestConfigWarning"], limit_s=TESTS_LIMIT_S),
             "benchmark": ran([sys.executable, "-m", "benchmarks.trainer", "--only", "gpu", "--out", str(options.out.parent)],
                              limit_s=BENCHMARK_LIMIT_S)}
    result = {"benchmark": "gpu_check", "machine": machine(), "commit": commit(), "device": torch.cuda.get_device_name(),
              "optional": {name: importlib.util.find_spec(name) is not None for name in ("vllm", "flash_attn")}, **parts}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for name, part in parts.items():
        print(name, "passed" if part["exit_code"] == 0 else "FAILED", f"in {part['seconds']:g} s")
        print("\n".join(part["last_lines"]))
    return int(any(part["exit_code"] for part in parts.values()))


if __name__ == "__main__":
    sys.exit(main())
