"""`asyncrl correction`: what it prints, writes and refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from asyncrl.cli import EXIT_OK, EXIT_USAGE, main
from asyncrl.correction import preset, presets
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
    (["try", "token_tis", "BATCH", "--plot", "no-folder/picture.png"], "--plot"),
])
def test_what_cannot_be_done_exits_2_and_says_what_can(arguments: list[str], says: str, recorded: Path,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    places = {"BATCH": str(recorded), "FOLDER": str(recorded.parent)}
    assert main(["correction", *(places.get(argument, argument) for argument in arguments)]) == EXIT_USAGE
    assert says in capsys.readouterr().err


def test_a_file_that_is_no_batch_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "other.npz", something=np.ones(3))
    assert main(["correction", "try", "icepop", str(tmp_path / "other.npz")]) == EXIT_USAGE
    assert "it lacks rollout_logprobs" in capsys.readouterr().err


def test_a_terminal_without_these_letters_is_no_error() -> None:
    done = subprocess.run([sys.executable, "-m", "asyncrl.cli", "correction", "explain", "icepop"], capture_output=True, timeout=120,
                          check=True, env={"PYTHONPATH": ":".join(filter(None, sys.path)), "PYTHONIOENCODING": "ascii"})
    assert b"icepop" in done.stdout


def test_listing_and_explaining_load_no_torch() -> None:
    code = ("import sys\nfrom asyncrl.cli import main\nmain(['correction', 'list']); main(['correction', 'explain', 'icepop'])\n"
            "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules\n")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True,
                   env={"PYTHONPATH": ":".join(filter(None, sys.path))})
