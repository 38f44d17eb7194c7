"""`asyncrl correction`: what it prints, writes and refuses."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.cli import EXIT_OK, EXIT_USAGE, main
from asyncrl.correction import preset, presets
from asyncrl.correction_cli.picture import drawable
from asyncrl.train.recorded import save_recorded
from tests.correction_cli.test_trial import SOME


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    save_recorded(SOME, tmp_path / "batch.npz")
    return tmp_path / "batch.npz"


def test_the_list_has_a_line_for_every_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["correction", "list"]) == EXIT_OK
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.split() == ["preset", "weight", "kept", "loss", "origin"]
    assert [line.split()[0] for line in lines] == list(presets())
    assert all(preset(line.split()[0]).origin in line for line in lines)


@pytest.mark.parametrize("name", presets())
def test_a_preset_is_explained_with_its_loss_origin_departures_and_evidence(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["correction", "explain", name]) == EXIT_OK
    told = capsys.readouterr().out
    assert max(map(len, told.splitlines())) <= 110
    joined, known = " ".join(told.split()), preset(name)
    for text in (known.origin, known.departs, known.paper, *known.evidence, f"loss {known.loss}(", known.aggregation):
        assert " ".join(text.split()) in joined, text


def test_a_trial_is_a_table_with_a_row_for_each_age_and_length(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["correction", "try", "slime/mis_token_mask", str(recorded)]) == EXIT_OK
    told = capsys.readouterr().out.splitlines()
    assert told[0] == ("slime/mis_token_mask on 1 recorded batch: 6 loss tokens of 3 sequences, of which 2 would not be trained at all")
    rows = {line.split("  ")[0]: line.split() for line in told[3:]}
    assert rows["all"] == ["all", "6", "16.7%", "0.0%", "66.7%", "16.7%", "0.167", "16.7%", "2.985"]
    assert [name for name in rows if name.startswith("staleness")] == ["staleness 0", "staleness 1", "staleness 2", "staleness 9+"]
    assert [name for name in rows if name.startswith("length")] == ["length 1", "length 2", "length 3"]
    assert told[-1] == "rule veto drops 33.3%"


def test_a_trial_as_json_has_the_counts(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["correction", "try", "token_tis", str(recorded), "--json"]) == EXIT_OK
    tree = json.loads(capsys.readouterr().out)
    assert (tree["preset"], tree["files"], tree["sequences"]) == ("token_tis", [str(recorded)], 3)
    assert {name: tree["all"][name] for name in ("tokens", "kept", "truncated", "masked", "rejected")} == {
        "tokens": 6, "kept": 6, "truncated": 2, "masked": 0, "rejected": 0}
    assert tree["by_staleness"]["9+"]["tokens"] == 1
    assert tree["by_length"]["3"]["truncated"] == 1


def test_a_trial_is_drawn(recorded: Path, tmp_path: Path) -> None:
    assert main(["correction", "try", "skyrl/outlier_mask", str(recorded), "--plot", str(tmp_path / "trial.png")]) == EXIT_OK
    assert (tmp_path / "trial.png").read_bytes().startswith(b"\x89PNG")


def test_the_batches_of_a_run_are_taken_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (2, 4):
        save_recorded(SOME, tmp_path / "corrections" / f"step-{step:08d}.npz")
    assert main(["correction", "try", "icepop", str(tmp_path)]) == EXIT_OK
    assert capsys.readouterr().out.startswith("icepop on 2 recorded batches: 12 loss tokens of 6 sequences")


@pytest.mark.parametrize(("arguments", "says"), [
    (["explain", "areal/decopled"], "Did you mean 'areal/decoupled'?"),
    (["try", "token_tsi", "BATCH"], "Did you mean 'token_tis'?"),
    (["try", "token_tis", "nowhere.npz"], "Check the path."),
    (["try", "token_tis", "nowhere"], "allowed: the folder of a run"),
    (["try", "token_tis", "FOLDER"], "trainer.record_batches_every_steps"),
    (["try", "areal/loglinear", "BATCH"], "log_linear"),
    (["try", "token_tis", "BATCH", "--plot", "picture.doc"], "--plot"),
    (["explain", "NONE"], "Did you mean 'none'?"),
    (["try", "token_tis", "a" * 300], "allowed: the folder of a run"),
    (["try", "token_tis", "a" * 300 + ".npz"], "Check the path."),
    (["try", "token_tis", "BATCH", "--plot", "no-folder/picture.png"], "No such file or directory"),
    (["try", "token_tis", "BATCH", "--plot", "BATCH/picture.png"], "Not a directory"),
    (["try", "token_tis", "BATCH", "--plot", "FOLDER/folder.png"], "Something else than a file"),
    (["try", "token_tis", "BATCH", "--plot", "/proc/picture.png"], "--plot = '/proc/picture.png' is not allowed"),
    (["try", "token_tis", "BATCH", "--plot", "a" * 300 + ".png"], "File name too long"),
    (["try", "token_tis", "BATCH", "--plot", "FOLDER/loop.png"], "--plot"),
])
def test_what_cannot_be_done_exits_2_and_says_what_can(arguments: list[str], says: str, recorded: Path,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    (recorded.parent / "folder.png").mkdir()
    (recorded.parent / "loop.png").symlink_to("loop.png")
    placed = [argument.replace("BATCH", str(recorded)).replace("FOLDER", str(recorded.parent)) for argument in arguments]
    assert main(["correction", *placed]) == EXIT_USAGE
    assert says in capsys.readouterr().err


def test_a_picture_without_a_place_is_told_before_anything_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.npz").write_bytes(b"")
    assert main(["correction", "try", "icepop", str(tmp_path / "broken.npz"), "--plot", str(tmp_path / "no" / "x.png")]) == EXIT_USAGE
    assert "--plot" in capsys.readouterr().err


def test_a_picture_that_cannot_be_finished_exits_2(recorded: Path, monkeypatch: pytest.MonkeyPatch,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    assert main(["correction", "try", "icepop", str(recorded), "--plot", str(recorded.with_suffix(".png"))]) == EXIT_USAGE
    assert "No space left on device" in capsys.readouterr().err


def test_trying_a_place_leaves_nothing_there_and_harms_no_picture(tmp_path: Path) -> None:
    (tmp_path / "broken.npz").write_bytes(b"")
    (tmp_path / "old.png").write_bytes(b"old")
    (tmp_path / "link.png").symlink_to("later.png")
    for name in ("old.png", "new.png", "link.png"):
        assert main(["correction", "try", "icepop", str(tmp_path / "broken.npz"), "--plot", str(tmp_path / name)]) == EXIT_USAGE
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.npz", "link.png", "old.png"]
    assert (tmp_path / "old.png").read_bytes() == b"old"


@pytest.mark.parametrize("name", ["a$\\frac{$", "$$", "two\nlines", "\udcff", "中文", "long" * 55, "_^{}\\"])
@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_a_file_of_any_name_is_drawn(name: str, ending: str, recorded: Path, tmp_path: Path) -> None:
    data = recorded.rename(tmp_path / f"{name}.npz")
    assert main(["correction", "try", "token_tis", str(data), "--plot", str(tmp_path / f"q.{ending}")]) == EXIT_OK
    assert (tmp_path / f"q.{ending}").stat().st_size > 1000


def test_a_title_keeps_both_ends_and_shows_what_cannot_be_printed() -> None:
    assert drawable("icepop on a\nb\udcff$x$.npz") == "icepop on a\\nb\\udcff$x$.npz"
    long = drawable("icepop on " + "a" * 300 + ".npz")
    assert (len(long), long[:12], long[-5:]) == (100, "icepop on aa", "a.npz")


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 3e38), (torch.float32, 1e38), (torch.float64, 1.7e308)])
@pytest.mark.parametrize("name", ["token_tis", "areal/decoupled"])
def test_log_ratios_that_overflow_are_refused(name: str, dtype: torch.dtype, size: float, recorded: Path,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    signs = torch.ones(len(SOME.loss_mask), dtype=dtype)
    signs[::2] = -1
    save_recorded(dataclasses.replace(SOME, rollout_logprobs=signs * size, proximal_logprobs=-signs * size), recorded)
    assert main(["correction", "try", name, str(recorded), "--json"]) == EXIT_USAGE
    told = capsys.readouterr()
    assert told.out == ""
    assert "add up to a finite number" in told.err


@pytest.mark.parametrize("name", [name for name in presets() if name != "areal/loglinear"])
def test_what_is_huge_and_adds_up_is_told_in_finite_numbers(name: str, recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    proximal = torch.full((len(SOME.loss_mask),), -1.0)
    proximal[1:3] = torch.tensor([1.5e38, -1.5e38])
    save_recorded(dataclasses.replace(SOME, rollout_logprobs=torch.full_like(proximal, -1.0), proximal_logprobs=proximal), recorded)
    assert main(["correction", "try", name, str(recorded), "--json"]) == EXIT_OK
    told = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert told["all"]["log_ratio_abs_mean"] == pytest.approx(3e38 / 6)


def test_a_file_that_is_no_batch_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "other.npz", something=np.ones(3))
    assert main(["correction", "try", "icepop", str(tmp_path / "other.npz")]) == EXIT_USAGE
    assert "it lacks rollout_logprobs" in capsys.readouterr().err


def test_the_command_itself_tries_a_preset(recorded: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "asyncrl.cli", "correction", "try", "token_tis", str(recorded)], capture_output=True,
                          text=True, timeout=120, check=False, env={"PYTHONPATH": ":".join(filter(None, sys.path))})
    assert (done.returncode, done.stderr) == (EXIT_OK, "")
    assert done.stdout.startswith("token_tis on 1 recorded batch: 6 loss tokens of 3 sequences")


@pytest.mark.parametrize("arguments", [["list"], ["explain", "icepop"]])
def test_a_closed_output_is_no_error(arguments: list[str]) -> None:
    done = subprocess.run(["/bin/sh", "-c", 'exec "$0" -m asyncrl.cli correction "$@" >&-', sys.executable, *arguments], timeout=120,
                          capture_output=True, text=True, check=False, env={"PYTHONPATH": ":".join(filter(None, sys.path))})
    assert (done.returncode, done.stderr) == (EXIT_OK, "")


def test_a_terminal_without_these_letters_is_no_error() -> None:
    done = subprocess.run([sys.executable, "-m", "asyncrl.cli", "correction", "explain", "icepop"], capture_output=True, timeout=120,
                          check=True, env={"PYTHONPATH": ":".join(filter(None, sys.path)), "PYTHONIOENCODING": "ascii"})
    assert b"icepop" in done.stdout


def test_listing_and_explaining_load_no_torch() -> None:
    code = ("import sys\nfrom asyncrl.cli import main\nmain(['correction', 'list']); main(['correction', 'explain', 'icepop'])\n"
            "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules\n")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True,
                   env={"PYTHONPATH": ":".join(filter(None, sys.path))})
