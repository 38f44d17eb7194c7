"""`asyncrl watch`: a run that warms up, goes on, is taken up again, ends or dies, seen from outside and not touched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asyncrl.cli import EXIT_FAILED, EXIT_OK, EXIT_USAGE, main
from asyncrl.config import dump_config, load_config
from asyncrl.observe.console import Console
from asyncrl.observe.plain import HEADER, PlainFace
from asyncrl.observe.watch import Watch, find_run
from asyncrl.paths import claim, is_claimed
from tests.observe.rows import step_row

BOUND_S = 60.0
ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "arithmetic" / "quickstart.yaml"
SUMMARY = {"reward_first": 0.1, "reward_last": 0.9, "eval_before": None, "eval_after": 0.8, "steps": 2, "wall_s": 12.3}


class Written:
    """A run as its folder shows it, made by hand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "logs").mkdir(parents=True)
        (folder / "config.yaml").write_text(dump_config(load_config(RECIPE, [f"run.name={folder.name}"])), encoding="utf-8")
        self.claim = claim(folder)

    def row(self, row: dict) -> None:
        with (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def ends(self, **changed: object) -> None:
        (self.folder / "summary.json").write_text(json.dumps(SUMMARY | changed), encoding="utf-8")
        self.claim.close()


@pytest.fixture
def run(tmp_path, monkeypatch) -> Iterator[Written]:
    monkeypatch.chdir(tmp_path)
    written = Written(Path("runs/sums"))
    yield written
    written.claim.close()


def watched(run: Written, *happenings: Callable[[], None]) -> tuple[bool, list[str]]:
    """Whether it ended well, and the lines, when the happenings take place one after another while it is watched."""
    lines: list[str] = []
    left = iter(happenings)
    ended_well = Watch(run.folder, Console(PlainFace(lines.append))).follow(lambda: next(left)())
    assert next(left, None) is None, "the watch ended too early"
    return ended_well, lines


def steps_of(lines: list[str]) -> list[int]:
    return [int(line.split()[0]) for line in lines if len(line) == len(HEADER) and line.split()[0].isdigit()]


def test_a_live_run_is_followed_from_its_warm_up_to_its_end(run):
    ended_well, lines = watched(
        run, lambda: (run.folder / "logs" / "prepare.log").write_text("warm-up step 10, accuracy 0.12\n"), lambda: None,
        lambda: run.row({"eval_version": 0, "eval/sums/reward/mean": 0.25, "eval/sums/errors/sum": 0}), lambda: run.row(step_row(1)),
        lambda: run.row(step_row(2)), run.ends)
    assert ended_well
    assert lines[1] == "no step yet; the processes start"
    assert lines[2] == "no step yet; prepare.log: warm-up step 10, accuracy 0.12"
    assert lines[3].startswith("  held-out    version 0, sums 0.250")
    assert steps_of(lines) == [1, 2]
    assert " ".join(lines[-2:]).startswith("reward 0.100 → 0.900, held-out not measured → 0.800, 2 steps in 12 s; see")


def test_what_was_there_before_is_a_summary_and_not_a_line_a_step(run):
    for step in range(1, 31):
        run.row(step_row(step))
    _, lines = watched(run, lambda: run.row(step_row(31)), lambda: run.ends(steps=31))
    assert lines[1].startswith("-- step 30 of 100")
    assert steps_of(lines) == [31]


def test_rows_written_just_before_the_end_are_shown(run):
    def last() -> None:
        run.row(step_row(2))
        run.ends()

    run.row(step_row(1))
    assert steps_of(watched(run, last)[1]) == [2]


def test_half_a_line_is_no_row_yet(run):
    text = json.dumps(step_row(2)) + "\n"
    path = run.folder / "metrics.jsonl"
    run.row(step_row(1))
    whole = path.read_text(encoding="utf-8")
    _, lines = watched(run, lambda: path.write_text(whole + text[:50]), lambda: path.write_text(whole + text), run.ends)
    assert steps_of(lines) == [2]


def test_a_run_that_is_taken_up_again_is_followed_from_there(run):
    def resumed() -> None:
        (run.folder / "metrics.jsonl").unlink()
        for step in (1, 2):
            run.row(step_row(step))
        run.row(step_row(3, reward__total__mean=0.7))

    for step in range(1, 6):
        run.row(step_row(step))
    ended_well, lines = watched(run, resumed, lambda: run.row(step_row(4)), lambda: run.ends(steps=4))
    again = lines.index("the run was taken up again from an earlier step, or begun anew")
    assert lines[again + 2].startswith("-- step 3 of 100")
    assert (ended_well, steps_of(lines[again:])) == (True, [4])


def test_a_run_that_dies_says_after_which_step_and_its_last_words(run):
    run.row(step_row(1))
    (run.folder / "logs" / "engine.log").write_text("all is well\nCUDA error: out of luck\n")
    ended_well, lines = watched(run, lambda: run.row(step_row(2)), run.claim.close)
    text = " ".join(line.strip() for line in lines)
    assert not ended_well
    assert "the run died after step 2 of 100, without a summary; last words: engine.log: CUDA error: out of luck; see" in text
    assert text.endswith("--resume goes on from its newest checkpoint")


def test_the_summary_of_an_earlier_end_does_not_speak_for_a_run_that_went_on_and_died(run):
    (run.folder / "summary.json").write_text(json.dumps(SUMMARY | {"steps": 2}))
    for step in (1, 2, 3):
        run.row(step_row(step))
    ended_well, lines = watched(run, run.claim.close)
    assert not ended_well
    assert any(line.startswith("the run died after step 3") for line in lines)


def test_a_run_that_ended_early_says_why(run):
    run.row(step_row(2))
    run.ends(ended_early="RunAborted: nothing left")
    ended_well, lines = watched(run)
    assert not ended_well
    assert "ended early: RunAborted: nothing left" in " ".join(line.strip() for line in lines)


def test_looking_once_shows_how_things_stand(run):
    lines: list[str] = []
    assert Watch(run.folder, Console(PlainFace(lines.append))).once()
    assert lines[-1] == "running, no step yet"
    run.row(step_row(7))
    assert Watch(run.folder, Console(PlainFace(lines.append))).once()
    assert " ".join(lines).count("running, after step 7") == 1
    run.claim.close()
    assert not Watch(run.folder, Console(PlainFace(lines.append))).once()


def test_nothing_of_the_run_is_touched(run):
    def state() -> dict[str, tuple[int, bytes]]:
        return {str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"") for path in run.folder.parent.rglob("*")}

    run.row(step_row(1))
    before = state()
    watched(run, lambda: None, run.claim.close)
    assert state() == before
    claim(run.folder).close()


def test_the_command_gives_exit_codes(run, monkeypatch, capsys):
    assert main(["watch", "sums", "--once"]) == EXIT_OK

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", interrupted)
    assert main(["watch", "sums"]) == EXIT_OK
    run.claim.close()
    assert main(["watch", "runs/sums/"]) == EXIT_FAILED
    assert main(["watch", "summs"]) == EXIT_USAGE
    assert "Did you mean 'sums'?" in capsys.readouterr().err
    assert main(["watch", str(run.folder / "logs")]) == EXIT_USAGE


def test_a_configuration_that_is_half_written_is_waited_for(run):
    path = run.folder / "config.yaml"
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole[:40], encoding="utf-8")
    ended_well, lines = watched(run, lambda: None, lambda: path.write_text(whole), lambda: run.row(step_row(1)), run.ends)
    assert (ended_well, steps_of(lines)) == (True, [1])


def test_a_configuration_that_is_none_is_refused(run):
    run.claim.close()
    (run.folder / "config.yaml").write_text("run: {name: x}\n")
    assert main(["watch", str(run.folder), "--once"]) == EXIT_USAGE


@pytest.mark.parametrize("text", ["[1, 2]", '{"steps": "a"}', '{"steps": 6, "reward_first": "a", "reward_last": 1}', "\0"])
def test_a_summary_that_is_none_is_as_good_as_missing(run, text):
    run.row(step_row(1))
    run.claim.close()
    (run.folder / "summary.json").write_text(text)
    assert main(["watch", str(run.folder), "--once"]) == EXIT_FAILED


def test_a_run_is_found_by_folder_or_by_name(run, tmp_path):
    assert find_run("runs/sums") == find_run("sums") == tmp_path / "runs" / "sums"


@pytest.mark.slow
def test_whoever_watches_may_stop_and_the_run_does_not_notice(run):
    run.row(step_row(1))
    command = [sys.executable, "-m", "asyncrl.cli", "watch", "runs/sums"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          env=os.environ | {"PYTHONPATH": str(ROOT)}) as watching:
        assert watching.stdout is not None
        assert watching.stdout.readline().startswith("run sums: 100 steps")
        watching.send_signal(signal.SIGINT)
        _, errors = watching.communicate(timeout=BOUND_S)
    assert (watching.returncode, errors) == (EXIT_OK, "")
    assert is_claimed(run.folder)
