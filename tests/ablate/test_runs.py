"""Children: resumed, failed, too slow, interrupted, orphaned."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.ablate.command import ablate, describe
from asyncrl.ablate.runs import record_of, waves
from asyncrl.cli import EXIT_INTERRUPTED, EXIT_TERMINATED
from asyncrl.errors import ConfigError, RunAborted
from asyncrl.paths import claim
from tests.ablate.scene import ABLATION, HERE, planned, pretending, write  # noqa: F401

LIMIT_S = 60

pytestmark = pytest.mark.usefixtures("pretending")


def done(folder: Path, *, jobs: int = 2, **changes: Any) -> tuple[bool, list[str], dict[str, Any]]:
    """Whether all ended well, what was told, and results.json."""
    told: list[str] = []
    ended_well = ablate(planned(folder, jobs=jobs, **changes), tell=told.append)
    return ended_well, told, json.loads((folder / "out" / "results.json").read_text())


def test_every_run_of_the_grid_is_made_and_measured(tmp_path: Path) -> None:
    ended_well, told, results = done(tmp_path)
    assert ended_well
    assert len(results["runs"]) == 2 * 2 * 2
    run = next(run for run in results["runs"] if (run["point"], run["seed"]) == ({"rate": "0.02", "arm": "corrected"}, 1))
    assert run["values"] == {"reward": pytest.approx(4.25), "held-out": pytest.approx(17.0)}
    assert run["curves"]["reward/total/mean"] == {"steps": [1, 2, 3], "values": [4.1, 4.2, 4.3]}
    assert (run["error"], run["steps"]) == (None, 3)
    assert told[0].startswith("small: 8 runs, 0 finished before")
    assert "[8/8] rate 0.02, arm corrected, seed 1: reward 4.25, held-out 17" in " ".join(told)
    assert {path.name for path in (tmp_path / "out").glob("*.png")} == {"curves.png", "reward.png", "held_out.png"}


def test_what_is_large_goes_unless_it_is_to_be_kept(tmp_path: Path) -> None:
    for keep in (False, True):
        folder = tmp_path / str(keep)
        folder.mkdir()
        done(folder, keep_models=keep)
        assert len(list((folder / "out" / "runs").glob("*/model"))) == 8 * keep
        assert len(list((folder / "out" / "runs").glob("*/metrics.jsonl"))) == 8


def test_what_is_finished_is_kept_and_what_was_changed_is_run(tmp_path: Path) -> None:
    done(tmp_path)
    before = {path: path.read_text() for path in (tmp_path / "out" / "runs").glob("*/pid")}
    _, told, _ = done(tmp_path, seeds=[0, 1, 2], steps=3)
    assert told[0].startswith("small: 12 runs, 8 finished before")
    assert {path: path.read_text() for path in before} == before
    _, told, results = done(tmp_path, seeds=[0, 1], steps=4)
    assert told[0].startswith("small: 8 runs, 0 finished before")
    assert {run["steps"] for run in results["runs"]} == {4}


def test_another_report_needs_no_run(tmp_path: Path) -> None:
    done(tmp_path)
    _, told, results = done(tmp_path, report={"highest": {"metric": "reward/total/mean", "stat": "max"}})
    assert told[0].startswith("small: 8 runs, 8 finished before")
    assert {run["values"]["highest"] for run in results["runs"]} == {1.3, 2.3, 3.3, 4.3}


def test_a_failure_is_recorded_with_its_message_and_ends_no_other(tmp_path: Path) -> None:
    failing = {"prompts.arguments": {"behaviour": "fail 1"}}
    ended_well, told, results = done(tmp_path, settings=failing)
    assert not ended_well
    failed = [run for run in results["runs"] if run["error"] is not None]
    assert [run["seed"] for run in failed] == [1] * 4
    assert failed[0]["error"] == "exit code 1: asyncrl: RunAborted: the reward was too good"
    assert {mean["seeds"] for mean in results["means"]} == {1}
    table = (tmp_path / "out" / "table.md").read_text()
    assert "| plain | 1.25 (1) | 2.25 (1) |" in table
    assert "- rate 0.01, arm plain, seed 1: exit code 1: asyncrl: RunAborted" in table
    _, told, _ = done(tmp_path, settings=failing)
    assert told[0].startswith("small: 8 runs, 4 finished before")


def test_a_run_that_is_killed_has_failed(tmp_path: Path) -> None:
    ended_well, _, results = done(tmp_path, settings={"prompts.arguments": {"behaviour": "die 0"}})
    assert not ended_well
    assert {run["error"] for run in results["runs"] if run["seed"] == 0} == {"killed by SIGKILL: it said nothing"}


def test_a_run_over_its_time_is_ended(tmp_path: Path) -> None:
    _, _, results = done(tmp_path, settings={"prompts.arguments": {"behaviour": "stay 1"}}, timeout_s=1.0, jobs=4)
    assert [run["error"] for run in results["runs"]] == [None] * 4 + ["ended after timeout_s = 1: still here"] * 4
    for place in (tmp_path / "out" / "runs").glob("*/pid"):
        assert not Path(f"/proc/{place.read_text()}").exists()


@pytest.mark.parametrize(("signum", "code", "said"), [
    (signal.SIGINT, EXIT_INTERRUPTED, "ended by SIGINT"), (signal.SIGTERM, EXIT_TERMINATED, "ended by SIGTERM"),
    (signal.SIGKILL, -signal.SIGKILL, "")], ids=["ctrl-c", "terminated", "killed"])
def test_whatever_ends_it_no_child_is_left_and_it_goes_on_where_it_was(signum: int, code: int, said: str, tmp_path: Path) -> None:
    os.mkfifo(fifo := tmp_path / "fifo")
    changes = {"settings": {"prompts.arguments": {"behaviour": "stay 1", "fifo": str(fifo)}}}
    told = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    process = subprocess.Popen([sys.executable, "-m", "tests.ablate.scene", str(write(tmp_path, **changes)), str(tmp_path / "out"), "1"],
                               cwd=HERE.parents[1], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        wait_until_readable(told)  # the runs of seed 0 are over, one of seed 1 stays
        child = os.pidfd_open(int(os.read(told, 20)))
        process.send_signal(signum)
        _, text = process.communicate(timeout=LIMIT_S)
        assert process.returncode == code
        assert said in text
        assert "Traceback" not in text
        wait_until_readable(child)  # as the descriptor of a process is when it has ended
    finally:
        process.kill()
        process.wait()
    os.close(told)
    os.close(child)
    plan = planned(tmp_path, **changes)
    assert [record_of(run) is not None for run in plan.runs] == [True] * 4 + [False] * 4
    assert len(json.loads((tmp_path / "out" / "results.json").read_text())["runs"]) == 4
    assert "8 runs, 4 of them finished before" in describe(plan)


def wait_until_readable(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(LIMIT_S * 1000)


def test_a_signal_without_a_name_is_told_by_its_number(tmp_path: Path) -> None:
    _, _, results = done(tmp_path, settings={"prompts.arguments": {"behaviour": "die in real time 0"}})
    assert {run["error"] for run in results["runs"] if run["seed"] == 0} == {f"killed by signal {signal.SIGRTMIN + 6}: it said nothing"}


def test_a_folder_that_goes_away_ends_it_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(RunAborted, match="folder of the ablation was changed while it ran"):
        done(tmp_path, settings={"prompts.arguments": {"behaviour": "vanish 0"}}, jobs=2)


ROW = '{"trainer_step": 1, "reward/total/mean": 0.5}\n'


@pytest.mark.parametrize(("name", "content", "said"), [
    ("ablation.json", '{"key": KEY, "wall_s": "long", "commit": null, "error": null}', "its ablation.json is damaged"),
    ("ablation.json", '{"key": KEY, "wall_s": NaN, "commit": null, "error": null}', "its ablation.json is damaged"),
    ("ablation.json", '{"key": KEY, "wall_s": 1, "commit": 5, "error": null}', "its ablation.json is damaged"),
    ("ablation.json", '{"key": KEY, "wall_s": 1' + "0" * 400 + "}", "its ablation.json is damaged"),
    ("ablation.json", "[" * 100_000, "its ablation.json is damaged"),
    ("ablation.json", "", "its ablation.json is damaged"),
    ("metrics.jsonl", ROW.replace("0.5", '"half"'), "reward/total/mean is no finite number"),
    ("metrics.jsonl", ROW.replace("0.5", "NaN"), "reward/total/mean is no finite number"),
    ("metrics.jsonl", ROW.replace("0.5", "9" * 400), "reward/total/mean is no finite number"),
    ("metrics.jsonl", ROW.replace("0.5", "[0.5]"), "reward/total/mean is no finite number"),
    ("metrics.jsonl", ROW + ROW.replace("trainer_step", "step"), "of step None"),
    ("metrics.jsonl", ROW.replace("1", '"first"'), "of step first"),
    ("metrics.jsonl", ROW.replace("1", "9" * 400), "of step 99"),
    ("metrics.jsonl", ROW.replace("1", "NaN"), "of step nan"),
    ("metrics.jsonl", "[" * 100_000, "has no step"),
    ("metrics.jsonl", "", "has no step")])
def test_what_is_damaged_is_told_of_and_run_again(name: str, content: str, said: str, tmp_path: Path) -> None:
    one = {"axes": {"rate": ABLATION["axes"]["rate"]}, "seeds": [0]}
    _, _, before = done(tmp_path, **one)
    run, other = planned(tmp_path, **one).runs
    kept = (other.folder / "pid").read_text()
    (run.folder / name).write_text(content.replace("KEY", json.dumps(run.key)))
    assert said in describe(planned(tmp_path, **one))
    ended_well, told, after = done(tmp_path, **one)
    assert ended_well
    assert told[0].startswith("small: 2 runs, 1 finished before")
    assert said in told[1]
    assert told[1].endswith("it is run again")
    assert (other.folder / "pid").read_text() == kept
    assert [run["values"] for run in after["runs"]] == [run["values"] for run in before["runs"]]


def test_a_file_in_the_place_of_a_run_is_told_of_and_gives_way(tmp_path: Path) -> None:
    (run, *_) = planned(tmp_path).runs
    run.folder.parent.mkdir(parents=True)
    run.folder.write_text("a file")
    ended_well, told, results = done(tmp_path)
    assert ended_well
    assert "is no run" in told[1]
    assert len(results["runs"]) == 8


def test_a_run_that_ends_well_with_damaged_rows_has_failed(tmp_path: Path) -> None:
    ended_well, _, results = done(tmp_path, settings={"prompts.arguments": {"behaviour": "scribble 0"}})
    assert not ended_well
    assert {run["error"] for run in results["runs"] if run["seed"] == 0} == {"a row of metrics.jsonl is of step first"}


@pytest.mark.parametrize(("change", "said"), [
    (lambda tree: tree | {"ablation": "other"}, "ablation other"), (lambda tree: tree | {"axes": {"size": {}}}, "axes ['size']"),
    (lambda tree: tree | {"profile": "quick"}, "profile quick"), (lambda tree: tree | {"recipe": "another"}, "recipe another"),
    (lambda tree: [tree], "not what an ablation writes")], ids=["ablation", "axes", "profile", "recipe", "foreign"])
def test_results_of_another_ablation_are_not_written_over(change: Callable[[Any], Any], said: str, tmp_path: Path) -> None:
    one = {"axes": {"rate": ABLATION["axes"]["rate"]}, "seeds": [0]}
    _, _, results = done(tmp_path, **one)
    place = tmp_path / "out" / "results.json"
    place.write_text(json.dumps(change(results)))
    before = place.read_text()
    with pytest.raises(ConfigError, match="--out") as caught:
        done(tmp_path, **one)
    assert said in str(caught.value)
    assert place.read_text() == before


def test_a_table_of_something_else_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "table.md").write_text("# Mine\n")
    with pytest.raises(ConfigError, match=r"table\.md"):
        done(tmp_path)


def test_two_do_not_work_in_one_folder(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    plan.folder.mkdir()
    with claim(plan.folder.absolute() / "ablation"), pytest.raises(ConfigError, match="no other `asyncrl ablate`"):
        ablate(plan, tell=print)


def test_no_job_is_no_number_of_jobs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--jobs"):
        planned(tmp_path, jobs=0)


def test_a_record_of_other_settings_or_half_a_record_is_none(tmp_path: Path) -> None:
    done(tmp_path)
    run = planned(tmp_path).runs[0]
    place = run.folder / "ablation.json"
    whole = place.read_text()
    assert record_of(run) is not None
    place.write_text(whole.replace(run.key, "another"))
    assert record_of(run) is None
    place.write_text(whole[:20])
    assert record_of(run) is None


def test_one_run_of_each_model_goes_first(tmp_path: Path) -> None:
    axes = {"model": {"kind": "values", "keys": ["model.path"], "values": ["one", "two"]},
            "rate": {"kind": "values", "keys": ["trainer.learning_rate"], "values": [0.01, 0.02]}}
    first, others = waves(planned(tmp_path, axes=axes).runs)
    assert [(run.point["model"], run.point["rate"], run.seed) for run in first] == [("one", "0.01", 0), ("two", "0.01", 0)]
    assert len(others) == 6


def test_a_metric_that_no_row_has_is_told_of(tmp_path: Path) -> None:
    _, told, results = done(tmp_path, report={"reward": {"metric": "reward/total/maen"}})
    assert [line for line in told if "warning" in line] == [
        "warning: rate 0.01, arm plain, seed 0 has no metric reward/total/maen. Did you mean 'reward/total/mean'?"]
    assert results["means"] == []
    _, told, _ = done(tmp_path, report={"reward": {"metric": "reward/total/mena"}})
    assert [line for line in told if "warning" in line] == [
        "warning: rate 0.01, arm plain, seed 0 has no metric reward/total/mena. Did you mean 'reward/total/mean'?"]
    assert "| plain | - | - |" in (tmp_path / "out" / "table.md").read_text()
