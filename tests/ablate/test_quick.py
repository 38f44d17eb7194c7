"""The shipped ablation of staleness in its quick profile, with real runs: killed, gone on with, and what it leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 300


@pytest.mark.slow
def test_the_quick_profile_survives_a_kill_and_leaves_results_a_table_and_pictures(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "asyncrl.cli", "ablate", "ablations/staleness", "--quick", "--out", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert next(process.stdout).startswith("staleness: 2 runs, 0 finished before")
        assert next(process.stdout).startswith("[1/2] lag 0, correction decoupled + token TIS, seed 0: held-out reward ")
        process.kill()
    (first,) = tmp_path.glob("runs/*/ablation.json")
    before = first.read_bytes()

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.startswith("staleness: 2 runs, 1 finished before")
    assert first.read_bytes() == before

    results = json.loads((tmp_path / "results.json").read_text())
    runs = {run["point"]["lag"]: run for run in results["runs"]}
    assert (results["ablation"], results["profile"], results["steps"]) == ("staleness", "quick", 4)
    assert list(runs) == ["0", "1"]
    for lag, run in runs.items():
        assert (run["error"], run["steps"]) == (None, 4)
        assert run["curves"]["reward/total/mean"]["steps"] == [1, 2, 3, 4]
        assert run["curves"]["eval/held_out/reward/mean"]["steps"] == [0, 4]
        assert 0 <= run["values"]["held-out reward"] <= 1
        is_stale = lag != "0"
        assert (run["values"]["KL"] > 1e-6) == is_stale, "only stale data differ from the trainer's policy"
        assert (run["values"]["ESS"] < 0.9999) == is_stale
    rewards = [run["curves"]["reward/total/mean"]["values"] for run in runs.values()]
    assert rewards[0] != rewards[1]
    assert len(results["means"]) == 2 * 4
    assert {mean["seeds"] for mean in results["means"]} == {1}

    table = (tmp_path / "table.md").read_text()
    assert "| correction | lag 0 | lag 1 |" in table
    assert table.count("| decoupled + token TIS |") == 4 + 1
    pictures = sorted(path.name for path in tmp_path.glob("*.png"))
    assert pictures == ["curves.png", "ess.png", "held_out_reward.png", "kl.png", "reward.png"]
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") and (tmp_path / name).stat().st_size > 10_000 for name in pictures)
