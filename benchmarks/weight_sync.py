"""What weight sync costs: detection and encoding beside `copy_`, bytes a change, and whole syncs into a real vLLM beside other ways.

    python -m benchmarks.weight_sync             # everything; writes results/weight_sync/*.json and the tables of docs/weight_sync.md
    python -m benchmarks.weight_sync --only encode sync --models 135M
    python -m benchmarks.weight_sync --quick     # a small model, no engine: that it runs, nothing else; into --out

All figures of a model are of one run on one machine, in rounds: every contestant takes its turn in each. Seconds are the least of all
rounds, since whatever else the machine does only makes one longer; medians are beside them in the files. `copy_s` is torch's `copy_` of the
model as published, in the same rounds. Values that change do so at random places by one step of bfloat16's grid. Detection begins with
published bits in memory and ends with payloads in memory; a sync begins with a trainer's float32 weights, and its files lie in shared
memory. Nobody asks the engine for anything meanwhile. `load` is the machine's load average before and after.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import weight_sync_page
from benchmarks.machine import ROOT, commit, machine
from benchmarks.weight_sync_models import CONFIGS, QUICK

RESULTS = ROOT / "benchmarks" / "results" / "weight_sync"
SYNC_DENSITIES = (0.0005, 0.01, 0.1)
SHARED_MEMORY = "/dev/shm"
TIMEOUT_S = 1800

DETECTION_AT_LEAST = {0.0005: 0.5, 0.01: 0.3}
"""Share of the speed of a copy, by density."""
BYTES_AT_MOST, BYTES_UP_TO = 4.2, 0.06
"""Bytes a change, on tensors of a million elements and more, up to this density."""
DENSE_AT_MOST = 1.01
APPLY_AT_LEAST = 10.0
"""Times as fast as vLLM's sparse loader at 1%."""
SYNC_AT_LEAST = 5.0
"""Times as fast as gathering two FSDP2 ranks, a file and a reload, at 1%."""
PAUSE_AT_MOST = 0.2
"""Share of the sync at 1%."""
TINY = "0.6M"
"""Too small for the pause to say anything, and for a copy to be one of memory; its figures are reported alone."""


def encode(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Detection and encoding of one model."""
    found = run("benchmarks.weight_sync_encode", {"model": name, "threads": options.threads, "rounds": 1 if options.quick else 11})
    return found | judged({} if name == TINY else encode_targets(found))


def sync(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Whole syncs of one model, in a process of its own."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as root:
        spec = {"model": name, "root": root, "threads": options.threads, "rounds": 1 if options.quick else 5,
                "densities": SYNC_DENSITIES}
        found = run("benchmarks.weight_sync_engine", spec)
    return found | judged(sync_targets(found, pause=name != TINY))


def run(module: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """What the module measured, in a process of its own, whose threads sleep while they wait for one another: where they spin, and the
    machine has other work to do, a copy takes fifty times as long."""
    ours = {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(spec["threads"]), "HF_HUB_OFFLINE": "1", "ASYNCRL_VLLM": "1",
            "VLLM_PLUGINS": "asyncrl", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run([sys.executable, "-m", module, json.dumps(spec)], cwd=ROOT, env=os.environ | ours, capture_output=True, text=True,
                          timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise SystemExit(f"{module} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def encode_targets(found: Mapping[str, Any]) -> dict[str, tuple[float, float, bool]]:
    """By name: what was found, the target, whether it is met."""
    rows = {row["asked"]: row for row in found["densities"]}
    fastest = "numba" if found["compiled"] else "numpy"
    speeds = {f"share of copy_ at {density:.2%}": (rows[density][fastest]["share_of_copy"], least, True)
              for density, least in DETECTION_AT_LEAST.items()}
    large = [row["bytes_per_change_large"] for row in rows.values() if row["asked"] <= BYTES_UP_TO]
    sizes = {"bytes per change to 6%": (max(large), BYTES_AT_MOST, False),
             "share of dense": (max(row["share_of_dense"] for row in rows.values()), DENSE_AT_MOST, False)}
    return {name: (value, bound, value >= bound if at_least else value <= bound) for name, (value, bound, at_least) in
            (speeds | sizes).items()}


def sync_targets(found: Mapping[str, Any], *, pause: bool) -> dict[str, tuple[float, float, bool]]:
    """As `encode_targets`, at 1%."""
    row = next(row for row in found["densities"] if row["asked"] == 0.01)
    share = row["ways"]["delta"]["pause_share"]
    ratios = row["ratios"]
    faster = {"times vLLM's sparse loader, in the pause": (ratios["vllm_sparse_pause"], APPLY_AT_LEAST),
              "times vLLM's sparse loader, engine's whole work": (ratios["vllm_sparse_engine"], APPLY_AT_LEAST),
              "times gathering and a whole reload": (ratios["gather_whole"], SYNC_AT_LEAST)}
    judged_so = {name: (value, least, value >= least) for name, (value, least) in faster.items()}
    return judged_so | ({"pause share": (share, PAUSE_AT_MOST, share < PAUSE_AT_MOST)} if pause else {})


def judged(targets: Mapping[str, tuple[float, float, bool]]) -> dict[str, Any]:
    """As the files have it."""
    return {"targets": {name: {"found": value, "target": bound, "met": met} for name, (value, bound, met) in targets.items()}}


SECTIONS = {"encode": encode, "sync": sync}


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, write a file a section and model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(SECTIONS), default=tuple(SECTIONS))
    parser.add_argument("--models", nargs="+", choices=tuple(CONFIGS), default=tuple(CONFIGS))
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of torch, of the publisher, of vLLM (default: all cores)")
    parser.add_argument("--quick", action="store_true", help="a small model, detection alone")
    parser.add_argument("--page", action="store_true", help="measure nothing; write the tables of docs/weight_sync.md from the files")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if options.quick and options.out == RESULTS:
        raise SystemExit("--quick measures nothing worth keeping: give --out a folder of its own")
    if options.page:
        weight_sync_page.write(options.out)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    at, ran_on = commit(), machine()
    for section in ("encode",) if options.quick else options.only:
        for name in QUICK if options.quick else options.models:
            before = os.getloadavg()[0]
            found = SECTIONS[section](name, options)
            result = {"benchmark": f"weight_sync/{section}-{name}", "model": name, "machine": ran_on, "commit": at,
                      "threads": options.threads, "load": [round(before, 1), round(os.getloadavg()[0], 1)], **found}
            (options.out / f"{section}-{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            print(section, name, json.dumps(found["targets"]), flush=True)
    if not options.quick and options.out == RESULTS:
        weight_sync_page.write(RESULTS)


if __name__ == "__main__":
    main()
