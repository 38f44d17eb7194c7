"""The command line: exit codes and messages before anything starts."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
from pathlib import Path

import pytest

from asyncrl import yaml_text
from asyncrl.cli import EXIT_FAILED, EXIT_USAGE, main
from asyncrl.errors import RunAborted
from asyncrl.observe.console import Console
from asyncrl.observe.plain import PlainFace

QUICKSTART = Path(__file__).parents[1] / "recipes" / "arithmetic" / "quickstart.yaml"


def test_an_unknown_setting_names_its_nearest_neighbour_and_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(QUICKSTART), "--dry-run", "trainer.learnig_rate=1e-6"]) == EXIT_USAGE
    assert "Did you mean 'learning_rate'?" in capsys.readouterr().err


def test_a_setting_written_as_an_option_exits_2_with_the_right_form(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["train", str(QUICKSTART), "--learnig_rate", "1e-6"])
    assert stop.value.code == EXIT_USAGE
    assert "section.key=value" in capsys.readouterr().err


@pytest.mark.parametrize("setting", ["prompts.function=task.py:nothing", "env.reward=task.py:nothing", "warm_up.examples=no.py:x",
                                     "sampling.top_p=1.9", "buffer.max_staleness=-1", "trainer.processes=none"])
def test_what_cannot_work_exits_2_and_says_what_is_allowed(setting: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(QUICKSTART), setting, "--dry-run"]) == EXIT_USAGE
    assert "is not allowed" in capsys.readouterr().err


def test_a_missing_recipe_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "no-such.yaml"]) == EXIT_USAGE
    assert "is not allowed" in capsys.readouterr().err


def test_what_an_override_takes_with_it_is_told_beside_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "arithmetic/quickstart", "eval.kind=none", "--dry-run"]) == 0
    told = capsys.readouterr()
    assert told.err.startswith("asyncrl: eval.kind is set, so the recipe's own settings there do not apply: eval.sets=")
    assert told.err.count("\n") == 1
    assert yaml_text.read(told.out)["eval"] == {"kind": "none"}


def test_the_recipes_are_listed_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    assert "arithmetic/quickstart " in capsys.readouterr().out


def test_the_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "asyncrl recipe"


@pytest.mark.parametrize(("arguments", "missing"), [([], "COMMAND"), (["train"], "recipe"), (["watch"], "RUN")])
def test_a_command_line_that_is_not_whole_says_what_is_missing(arguments, missing, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == EXIT_USAGE
    assert f"the following arguments are required: {missing}\n" in capsys.readouterr().err


def test_a_command_without_settings_refuses_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["recipes", "run.steps=3"])
    assert stop.value.code == EXIT_USAGE


def test_overrides_may_stand_before_and_after_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(QUICKSTART), "run.steps=7", "--dry-run", "run.seed=3"]) == 0
    text = capsys.readouterr().out
    assert "steps: 7" in text
    assert "seed: 3" in text


def test_a_run_that_a_limit_ends_is_one_message_and_exits_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async def aborted(*given: object, **named: object) -> None:
        raise RunAborted("33 of the last 40 rollouts failed")

    monkeypatch.setattr("asyncrl.cli.train", aborted)
    assert main(["train", str(QUICKSTART)]) == EXIT_FAILED
    assert capsys.readouterr().err == "asyncrl: RunAborted: 33 of the last 40 rollouts failed\n"


def test_a_run_that_a_signal_ends_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async def interrupted(config: object, **options: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(60)

    monkeypatch.setattr("asyncrl.cli.check_environment", lambda config, **options: None)
    monkeypatch.setattr("asyncrl.cli.train", interrupted)
    assert main(["train", str(QUICKSTART), "--quiet"]) == 128 + signal.SIGTERM
    assert "ended by SIGTERM; --resume auto goes on" in capsys.readouterr().err


def test_a_full_disk_is_one_line_and_exits_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async def full(*given: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "runs/x/metrics.jsonl")

    monkeypatch.setattr("asyncrl.cli.train", full)
    assert main(["train", str(QUICKSTART)]) == EXIT_FAILED
    assert capsys.readouterr().err.splitlines() == [
        "asyncrl: what the run writes has no place: [Errno 28] No space left on device: 'runs/x/metrics.jsonl'"]


def test_a_child_that_does_not_answer_is_one_message_and_exits_1(monkeypatch: pytest.MonkeyPatch,
                                                                 capsys: pytest.CaptureFixture[str]) -> None:
    async def silent(*given: object, **named: object) -> None:
        raise TimeoutError("child 'trainer-0' did not answer 'start' within 3 s")

    monkeypatch.setattr("asyncrl.cli.train", silent)
    assert main(["train", str(QUICKSTART)]) == EXIT_FAILED
    assert capsys.readouterr().err == "asyncrl: TimeoutError: child 'trainer-0' did not answer 'start' within 3 s\n"


@pytest.mark.parametrize("options", [[], ["--quiet"]])
def test_the_run_gets_the_console_that_was_asked_for_and_a_lost_line_is_told_of(options, monkeypatch, capsys):
    opened: list[bool] = []

    def open_console(*, quiet: bool) -> Console:
        opened.append(quiet)
        return Console(PlainFace(lambda line: 1 / 0))

    async def trained(config: object, *, console: Console, resume: object) -> None:
        console.note("a line")

    monkeypatch.setattr("asyncrl.cli.open_console", open_console)
    monkeypatch.setattr("asyncrl.cli.train", trained)
    assert main(["train", str(QUICKSTART), *options]) == 0
    assert opened == [bool(options)]
    assert "did not show everything, 1 times: ZeroDivisionError" in capsys.readouterr().err


def test_an_error_that_nobody_reads_still_has_its_exit_code(monkeypatch, tmp_path):
    with (tmp_path / "closed").open("w") as closed:
        monkeypatch.setattr("sys.stderr", closed)
    assert main(["train", "no-such.yaml"]) == EXIT_USAGE
